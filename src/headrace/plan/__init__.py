"""The pure part: integers and numpy in, integers and numpy out. No torch, files, clock or environment."""

from headrace.plan.balanced import Balanced
from headrace.plan.blocks import Blocks
from headrace.plan.bucketed import LengthBucketed
from headrace.plan.order import Order, Sequential, Shuffled, Subset
from headrace.plan.plan import Plan
from headrace.plan.weighted import Weighted

__all__ = ["Balanced", "Blocks", "LengthBucketed", "Order", "Plan", "Sequential", "Shuffled", "Subset", "Weighted"]
