"""Log-probabilities of targets from logits, and back; `gpu/softmax.py` has the same class as two kernels."""

from __future__ import annotations

from torch import Tensor


class Softmax:
    """Of logits y [N, V] with targets [N, K]; a float32 y is used up at once."""

    logprobs: Tensor
    """Of the targets, float32 [N, K]."""

    def __init__(self, y: Tensor, targets: Tensor) -> None:
        self._dtype = y.dtype
        self._targets = targets
        logits = y.float()
        logits.sub_(logits.amax(-1, keepdim=True))
        chosen = logits.gather(-1, targets)
        self._exps = logits.exp_()
        self._total = self._exps.sum(-1, keepdim=True)
        self.logprobs = chosen - self._total.log()

    def gradient(self, dlogprobs: Tensor) -> Tensor:
        """That of y [N, V], from that of the log-probabilities [N, K]; to be asked for once.

        Of a log-probability with respect to the logits it is one at the target, minus the softmax everywhere.
        """
        softmax = self._exps.mul_(-dlogprobs.sum(-1, keepdim=True) / self._total)
        return softmax.scatter_add_(-1, self._targets, dlogprobs).to(self._dtype)
