"""Task sequences: what is learned, one task after the other."""

from agscl.data.errors import DataError
from agscl.tasks.own_data import from_folder, from_hub, from_tensors
from agscl.tasks.registry import SEQUENCES, SequenceInfo, load
from agscl.tasks.task import Task, TaskSequence

__all__ = [
    "SEQUENCES",
    "DataError",
    "SequenceInfo",
    "Task",
    "TaskSequence",
    "from_folder",
    "from_hub",
    "from_tensors",
    "load",
]
