"""A watch over the routers of a run with experts."""

import math

from hpcai.log import Event, Reports
from hpcai.models.llm.config import ExpertsConfig

_REPORTS = 3  # in a row
_SHARE = 0.9  # of the largest possible excess over a balanced load


class RouterWatch:
    """A sink that emits a note to ``reports`` when routers collapse: the busiest expert of a layer computes nearly all tokens, in
    three reports of training in a row."""

    def __init__(self, reports: Reports, experts: ExpertsConfig) -> None:
        self._reports, self._experts, self._collapsed = reports, experts, 0

    def write(self, event: Event) -> None:
        load, cfg = event.fields.get("expert_load"), self._experts
        most = cfg.count / cfg.top_k
        if event.kind != "train" or load is None or most == 1:
            return
        self._collapsed = self._collapsed + 1 if load - 1 >= _SHARE * (most - 1) else 0
        if self._collapsed == _REPORTS:
            if cfg.score == "sinkhorn":
                advice = "lower step.lr, or raise model.experts.z_loss"
            elif cfg.correction:
                advice = f"raise model.experts.bias_update_rate ({cfg.bias_update_rate:g})"
            else:
                advice = f"raise model.experts.balance_loss ({cfg.balance_loss:g}; often 0.01), or lower step.lr"
            self._reports.emit(
                "note", step=event.fields["step"],
                text=f"routers have collapsed: the busiest expert has {load:.3g} times a balanced load, of at most {most:.3g}, at "
                f"an entropy of {event.fields['router_entropy']:.2g} of at most {math.log(cfg.count):.3g} nats; {advice}",
            )  # fmt: skip

    def close(self) -> None:
        """Do nothing."""
