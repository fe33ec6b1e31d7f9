"""Training that can be killed and started again."""

from diskbuf.training.evaluation import evaluate
from diskbuf.training.off_policy import train_off_policy
from diskbuf.training.offline import train_offline
from diskbuf.training.run import TrainResult

__all__ = ["TrainResult", "evaluate", "train_off_policy", "train_offline"]
