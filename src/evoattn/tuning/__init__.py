"""Tile configs: data, and the rules that choose them. Asked by backends, asks nobody."""

from evoattn.tuning.config import Config
from evoattn.tuning.tiled import TiledPlan, tiled_plan

__all__ = ["Config", "TiledPlan", "tiled_plan"]
