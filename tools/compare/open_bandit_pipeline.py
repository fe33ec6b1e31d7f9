"""Prints what Open Bandit Pipeline 0.5.7 estimates from a synthetic log, for tests/test_bandit_evaluation.py.

Open Bandit Pipeline needs Python 3.10 and old pins, so it has an environment of its own:

    python3.10 -m venv /tmp/obp
    /tmp/obp/bin/pip install --no-deps obp==0.5.7
    /tmp/obp/bin/pip install 'numpy<2' 'scikit-learn<1.4' 'pandas<2.2' 'scipy<1.12' 'matplotlib<3.8' 'seaborn<0.13' \
        tqdm pyyaml pyieoe mabwiser
    /tmp/obp/bin/python tools/compare/open_bandit_pipeline.py

The log, the policies and the model of rewards are made here of NumPy alone, and the test makes them by importing this.
"""

import dataclasses
import importlib
import importlib.metadata
import json
from typing import Any

import numpy as np

ROWS, ARMS, FEATURES = 2000, 5, 3


@dataclasses.dataclass(frozen=True)
class SyntheticLog:
    """What was logged. Propensities are rounded to float32 before anyone sees them, as a store would.

    Attributes:
        context: [N, d] float32.
        action: [N] int32.
        reward: [N] float32.
        propensity: [N] float32.
    """

    context: Any
    action: Any
    reward: Any
    propensity: Any


def synthetic_log() -> SyntheticLog:
    """A log whose policy and rewards both depend on the context."""
    rng = np.random.default_rng(20)
    context = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    chances = _softmax(context @ _coefficients(1))
    action = (chances.cumsum(axis=1) > rng.random(ROWS)[:, None]).argmax(axis=1)
    mean = (context @ _coefficients(2))[np.arange(ROWS), action]
    reward = 1 + mean + rng.normal(size=ROWS)
    return SyntheticLog(
        context,
        action.astype(np.int32),
        reward.astype(np.float32),
        chances[np.arange(ROWS), action].astype(np.float32),
    )


def evaluated_policy(context: Any) -> Any:
    """The probabilities [N, K] of the policy that is evaluated, one that is rather sure."""
    return _softmax(1.5 * (context @ _coefficients(3)))


def certain_policy(context: Any) -> Any:
    """The same for Replay, of a policy that is certain."""
    return np.eye(ARMS)[(context @ _coefficients(3)).argmax(axis=1)]


def expected_rewards(context: Any) -> Any:
    """The rewards [N, K] that a model expects, which is wrong."""
    return 0.8 + 0.6 * (context @ _coefficients(2))


def _coefficients(seed: int) -> Any:
    """[d, K]."""
    return np.random.default_rng(seed).normal(size=(FEATURES, ARMS))


def _softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def main() -> None:
    """Prints the figures as JSON, by the names that diskbuf gives its estimators."""
    ope = importlib.import_module("obp.ope")
    log = synthetic_log()
    context = log.context
    given = {"reward": log.reward.astype(np.float64), "action": log.action}
    chances = evaluated_policy(context)[:, :, None]
    weighed = {**given, "pscore": log.propensity.astype(np.float64), "action_dist": chances}
    modelled = {**weighed, "estimated_rewards_by_reg_model": expected_rewards(context)[:, :, None]}
    direct = {name: modelled[name] for name in ("action_dist", "estimated_rewards_by_reg_model")}
    figures = {
        "Replay": ope.ReplayMethod().estimate_policy_value(**given, action_dist=certain_policy(context)[:, :, None]),
        "IPS": ope.InverseProbabilityWeighting().estimate_policy_value(**weighed),
        "ClippedIPS(3)": ope.InverseProbabilityWeighting(lambda_=3.0).estimate_policy_value(**weighed),
        "SNIPS": ope.SelfNormalizedInverseProbabilityWeighting().estimate_policy_value(**weighed),
        "DirectMethod": ope.DirectMethod().estimate_policy_value(**direct),
        "DoublyRobust": ope.DoublyRobust().estimate_policy_value(**modelled),
        "SelfNormalizedDR": ope.SelfNormalizedDoublyRobust().estimate_policy_value(**modelled),
        "SwitchDR(2)": ope.SwitchDoublyRobust(lambda_=2.0).estimate_policy_value(**modelled),
        "DRos(5)": ope.DoublyRobustWithShrinkage(lambda_=5.0).estimate_policy_value(**modelled),
    }
    print("Open Bandit Pipeline", importlib.metadata.version("obp"), "with NumPy", np.__version__)
    print("the actions add up to", int(log.action.sum()), "and the rewards to", float(log.reward.sum(dtype=np.float64)))
    print(json.dumps({name: float(value) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
