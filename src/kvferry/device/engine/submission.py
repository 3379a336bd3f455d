"""One transfer between submit and receipt, as the engine's parts know it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.device.engine.gates import LoadGate
from kvferry.device.paths.ahead import ReadAhead
from kvferry.types import Outcome, Rank, Receipt, TransferId


@dataclass(eq=False)
class Submission:
    """One transfer between submit and receipt."""

    transfer_id: TransferId
    path: str = ""
    beside_model: bool = False
    num_runs: int = 1
    num_bytes: int = 0
    ready: int | None = None
    """Event recorded on the compute stream at submit; the copy comes after it."""
    start: int | None = None
    marks: list[int] = field(default_factory=list)
    """Events, one for each part that is queued, in their order."""
    end: int | None = None
    queued: bool = False
    """Nothing more will be queued for it; only its end is awaited."""
    reason: str = ""
    """Why it failed: the first fault, empty while there is none."""
    seconds: float = 0.0
    trouble_since: float | None = None
    ahead: ReadAhead | None = None
    """What was read of it before it was ordered."""
    gate: LoadGate | None = None
    """Shut while compute waits for this load though it is not queued yet."""
    after: Submission | None = None
    """A load that compute waits for; so may this, which is queued only once that one is."""

    @property
    def is_free(self) -> bool:
        """Whether nothing it comes behind is still being queued."""
        return self.after is None or self.after.queued

    def fail(self, error: BaseException) -> None:
        if not self.reason:
            self.reason = f"{type(error).__name__}: {error}"

    def receipt(self, rank: Rank) -> Receipt:
        """How it ended."""
        if self.reason:
            return Receipt(
                self.transfer_id,
                rank,
                Outcome.FAILED,
                self.reason,
                path=self.path,
                beside_model=self.beside_model,
                num_runs=self.num_runs,
            )
        return Receipt(
            self.transfer_id,
            rank,
            Outcome.OK,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            path=self.path,
            beside_model=self.beside_model,
            num_runs=self.num_runs,
        )
