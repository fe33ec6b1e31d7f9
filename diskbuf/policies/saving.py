"""Policies on disk: a TensorFlow SavedModel and, in a file of it, the specs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from diskbuf import specs
from diskbuf.errors import OptionError, StoreExistsError, StoreFormatError, StoreNotFoundError
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.policies.policy import Policy
from diskbuf.trajectories import PolicyStep, TimeStep
from diskbuf.tree import Structure

_SPECS_FILE = "policy_specs.json"
_FORMAT = "diskbuf policy 1"


def save_policy(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Saves a compiled policy with its current weights: a GreedyPolicy, or one of `policy_from(..., compiled=True)`.

    Of a policy that has a `compiled` method, as bandit policies do, what that returns is saved.

    The folder is a TensorFlow SavedModel with the signature "action", whose inputs are named after the leaves of the
    time step (`observation`, `observation_camera`), plus `policy_specs.json`. It appears at once, whole or not at all.

    Args:
        policy: The policy.
        path: A folder that isn't there yet; parents are made.

    Raises:
        OptionError: If the policy isn't a compiled one.
        StoreExistsError: If something is at the path.
        OSError: If it can't be written.
    """
    import tensorflow as tf

    path = Path(path)
    if not isinstance(policy, CompiledPolicy) and hasattr(policy, "compiled"):
        policy = policy.compiled()
    if not isinstance(policy, CompiledPolicy):
        raise OptionError(
            f"policy must be compiled to be saved, got {type(policy).__name__}. Save a GreedyPolicy (the "
            "wrapped_policy of an EpsilonGreedyPolicy), or one of policy_from(function, ..., compiled=True)."
        )
    if path.exists():
        raise StoreExistsError(
            f"path must be free, got {path}, which is there. Save under another name.", path=str(path)
        )
    facts = {"format": _FORMAT, "specs": specs.to_json((policy.time_step_spec, policy.policy_step_spec))}
    module = tf.Module()
    module.action = policy.on_leaves
    if policy.on_observation_leaves is not None:
        module.probabilities = policy.on_observation_leaves
    traced = policy.on_leaves.get_concrete_function()
    module.read_by_action = [*traced.graph.variables]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    try:
        tf.saved_model.save(module, str(unfinished), signatures={"action": traced})
        (unfinished / _SPECS_FILE).write_text(json.dumps(facts))
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_policy(path: str | os.PathLike[str]) -> CompiledPolicy:
    """Loads what `save_policy` wrote: a policy that acts as the saved one did, with its specs.

    Loading runs no Python, but a SavedModel is a program: load none from people whose programs you wouldn't run.

    Args:
        path: The folder.

    Raises:
        StoreNotFoundError: If there is no folder at the path.
        StoreFormatError: If it is something else than what `save_policy` writes.
    """
    import tensorflow as tf

    path = Path(path)
    if not path.is_dir():
        raise StoreNotFoundError(f"path must be a folder that save_policy wrote, got {path}: nothing is there.")
    try:
        facts = json.loads((path / _SPECS_FILE).read_text())
        if facts["format"] != _FORMAT:
            raise StoreFormatError(f"a saved policy must be of format {_FORMAT!r}, got {facts['format']!r}.")
        time_step_spec, policy_step_spec = specs.from_json(facts["specs"])
        model = tf.saved_model.load(str(path))
        model.action.concrete_functions  # noqa: B018 - is there, and is a function
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreFormatError(
            f"{path} must be a folder that save_policy wrote, got {type(error).__name__}: {error}", path=str(path)
        ) from error
    inputs = Structure((time_step_spec, policy_step_spec.state))
    outputs, observations = Structure(policy_step_spec), Structure(time_step_spec.observation)

    # Refers to the model, which owns the variables.
    def act(time_step: TimeStep, policy_state: Any) -> PolicyStep:
        step: PolicyStep = outputs.unflatten(model.action(*inputs.flatten((time_step, policy_state))))
        return step

    def chances(observation: Any) -> Any:
        return model.probabilities(*observations.flatten(observation))

    return CompiledPolicy(
        act,
        time_step_spec,
        policy_step_spec.action,
        policy_state_spec=policy_step_spec.state,
        info_spec=policy_step_spec.info,
        probabilities=chances if hasattr(model, "probabilities") else None,
    )


def newest_policy(path: str | os.PathLike[str]) -> Path:
    """Returns where the policy is that a path stands for: that folder itself, or the newest `policy_N` in it.

    Trainings leave policies under such names in their folders, N the number of steps.

    Raises:
        StoreNotFoundError: If there is no folder at the path.
        StoreFormatError: If it is neither a policy nor a folder with one.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StoreNotFoundError(
            f"path must be a saved policy, or the folder of a training, got {folder}: no folder is there.",
            path=str(folder),
        )
    if (folder / _SPECS_FILE).exists():
        return folder
    found = [(int(number), there) for there in folder.glob("policy_*") if (number := there.name[7:]).isdecimal()]
    found = [(number, there) for number, there in found if (there / _SPECS_FILE).exists()]
    if not found:
        raise StoreFormatError(
            f"{folder} must be a saved policy, or the folder of a training with one, but there is no {_SPECS_FILE} in "
            "it, and no policy_N. A training saves one when it ends: run it again to go on.",
            path=str(folder),
        )
    return max(found)[1]
