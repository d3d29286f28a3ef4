"""The errors that llmpq raises, in one place for `except`: everything under `LlmpqError` is the
user's to mend, the others end a run through no mistake of theirs.

    LlmpqError
    ├── SpecError            an option, a cluster file, a model or a plan file
    │   └── FieldError         a field of a row, a request or of sampling
    ├── InfeasibleError      no plan fits
    │   ├── DoesNotFitError    into memory
    │   └── BoundNotMetError   within a bound of quality or latency
    ├── CheckpointError      weights that are missing, truncated or of another model
    ├── PlanMismatchError    a plan for another model or cluster
    ├── InputError           a file that cannot be read or written
    └── DeviceError          a device that is missing
    StageLostError           a stage's process died for good
    └── DeviceLostError        because its device is gone
    HeadLostError            the Ray that this process started has ended
"""

from quant.common.errors import (
    BoundNotMetError,
    CheckpointError,
    DeviceError,
    DeviceLostError,
    DoesNotFitError,
    FieldError,
    HeadLostError,
    InfeasibleError,
    InputError,
    LlmpqError,
    PlanMismatchError,
    SpecError,
    StageLostError,
)

__all__ = [
    "BoundNotMetError",
    "CheckpointError",
    "DeviceError",
    "DeviceLostError",
    "DoesNotFitError",
    "FieldError",
    "HeadLostError",
    "InfeasibleError",
    "InputError",
    "LlmpqError",
    "PlanMismatchError",
    "SpecError",
    "StageLostError",
]
