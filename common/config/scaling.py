"""The [scaling] table of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """The [scaling] table: how many replicas each stage may have, and when that changes.

    Off, every stage keeps the `replicas` of its own table. A replica costs so many devices of the
    `budget`; 0 means that none is set.
    """

    enabled: bool = False
    budget: int = 0
    encoder_min: int = 1  # 0: may go to sleep; its first image then waits for a start
    encoder_max: int = 4
    encoder_cost: int = 1
    prefill_min: int = 1
    prefill_max: int = 8
    prefill_cost: int = 1
    decode_min: int = 1
    decode_max: int = 8
    decode_cost: int = 1
    aim: float = 0.7  # share of a replica's time or slots that should be in use
    high: float = 0.8  # more replicas above this share
    low: float = 0.5  # fewer when the rest would stay below this share
    up_s: float = 5.0  # how long it must be so
    down_s: float = 120.0
    backlog_s: float = 30.0  # within which waiting work should be worked off
    window_s: float = 10.0  # over which a replica's figures are means
    start_s: float = 600.0  # a replica that has not started by then is given up
    retry_s: float = 300.0  # and no other is tried for so long

    def __post_init__(self) -> None:
        for stage in ("encoder", "prefill", "decode"):
            least, most = getattr(self, f"{stage}_min"), getattr(self, f"{stage}_max")
            if not (least > 0 or stage == "encoder") or least < 0 or most < max(1, least):
                raise ConfigError(
                    f"scaling.{stage}_min is {least} and {stage}_max {most}; only the encoder may "
                    "go down to 0, and the largest number is at least the smallest and 1"
                )
        if not 0 < self.low < self.aim < self.high <= 1:
            raise ConfigError(
                f"scaling.low, aim and high are {self.low:g}, {self.aim:g} and {self.high:g}; "
                "they must rise, between 0 and 1"
            )
        floor = sum(
            getattr(self, f"{s}_min") * getattr(self, f"{s}_cost")
            for s in ("encoder", "prefill", "decode")
        )
        if self.budget and self.budget < floor:
            raise ConfigError(f"scaling.budget is {self.budget}; the least replicas need {floor}")
        for key in ("backlog_s", "window_s", "start_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"scaling.{key} is {getattr(self, key)}; it must be above 0")
