"""One reader's way through an epoch: what it asks for, and the state that another reader may go on from."""

from headrace.progress.planned import PlanPass
from headrace.progress.sampled import SamplerPass
from headrace.progress.streamed import StreamPass

__all__ = ["PlanPass", "SamplerPass", "StreamPass"]
