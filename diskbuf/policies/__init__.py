"""Policies: what chooses actions, and the spec of the rows it collects."""

from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.policies.epsilon_greedy_policy import EpsilonGreedyPolicy
from diskbuf.policies.function_policy import policy_from
from diskbuf.policies.greedy_policy import GreedyPolicy
from diskbuf.policies.policy import Policy
from diskbuf.policies.random_policy import RandomPolicy
from diskbuf.policies.saving import load_policy, newest_policy, save_policy
from diskbuf.policies.schedules import LinearSchedule
from diskbuf.policies.scripted_policy import ScriptedPolicy

__all__ = [
    "CompiledPolicy",
    "EpsilonGreedyPolicy",
    "GreedyPolicy",
    "LinearSchedule",
    "Policy",
    "RandomPolicy",
    "ScriptedPolicy",
    "load_policy",
    "newest_policy",
    "policy_from",
    "save_policy",
]
