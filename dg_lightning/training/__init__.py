"""Training: LightningModules, class configs, checkpoints, weight averages and logging."""

from .averaging import copy_gates_to_averages, keep_settings_live, mask_averages
from .captured import CapturedSteps, DeviceScalars, is_replayed
from .checkpoint import read_checkpoint
from .classifier import GatedClassifier
from .language_model import GatedLM
from .module import GatedModule
from .optimizers import param_groups
from .regressor import GatedRegressor
from .spec import trust
from .step_logging import is_due, is_logged_step, log_step, logged_step

__all__ = [
    "CapturedSteps",
    "DeviceScalars",
    "GatedClassifier",
    "GatedLM",
    "GatedModule",
    "GatedRegressor",
    "copy_gates_to_averages",
    "is_due",
    "is_logged_step",
    "is_replayed",
    "keep_settings_live",
    "log_step",
    "logged_step",
    "mask_averages",
    "param_groups",
    "read_checkpoint",
    "trust",
]
