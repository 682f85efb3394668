"""Checks that people can run on their own implementations."""

from depthmix.testing.mixer_report import CheckResult, MixerCheckError, MixerReport, check_mixer
from depthmix.testing.rule_check import RuleCheckError, RuleReport, check_rule, rule_parameters

__all__ = [
    "CheckResult",
    "MixerCheckError",
    "MixerReport",
    "RuleCheckError",
    "RuleReport",
    "check_mixer",
    "check_rule",
    "rule_parameters",
]
