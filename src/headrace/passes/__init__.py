"""One reader's way through an epoch: what it asks for, and the state that another reader may go on from."""

from headrace.passes.planned import PlanPass
from headrace.passes.sampled import SamplerPass
from headrace.passes.streamed import StreamPass

__all__ = ["PlanPass", "SamplerPass", "StreamPass"]
