"""What a loader reads, its place in the epochs, and passes: one reader's way through one epoch."""

from headrace.progress.planned import PlanPass
from headrace.progress.sampled import SamplerPass
from headrace.progress.streamed import StreamPass

__all__ = ["PlanPass", "SamplerPass", "StreamPass"]
