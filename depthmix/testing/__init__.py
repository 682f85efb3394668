"""Checks that people can run on their own implementations."""

from depthmix.testing.mixer_report import CheckResult, MixerCheckError, MixerReport, check_mixer

__all__ = ["CheckResult", "MixerCheckError", "MixerReport", "check_mixer"]
