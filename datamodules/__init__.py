"""DataModules, one per dataset."""

from .base import BaseDataModule
from .cifar10 import CIFAR10DataModule
from .digits import DigitsDataModule
from .fashion_mnist import FashionMNISTDataModule
from .image_folder import ImageFolderDataModule
from .mnist import MNISTDataModule
from .pbmc3k import PBMC3kDataModule
from .speech_commands import SpeechCommandsDataModule
from .table import TabularDataModule
from .task_sequence import TaskSequence
from .text import TextDataModule
from .tiny_imagenet import TinyImageNetDataModule

__all__ = [
    "BaseDataModule",
    "CIFAR10DataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "MNISTDataModule",
    "PBMC3kDataModule",
    "SpeechCommandsDataModule",
    "TabularDataModule",
    "TaskSequence",
    "TextDataModule",
    "TinyImageNetDataModule",
]
