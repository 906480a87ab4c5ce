"""The head that makes scores of a text: small, on every rank whole, and computed in float32 for each text alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.layers.gelu import gelu_with_torch
from oarlock.workers.layers.norm import LayerNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.encoders.encoder_spec import ClassifierSpec, EncoderSpec
from oarlock.workers.weights.source import WeightSource


class Classifier:
    """Hidden states of one text [n, hidden] -> float32 [labels], without a final function."""

    def __init__(self, spec: EncoderSpec, head: ClassifierSpec, place: Placement) -> None:
        self.head = head
        self.hidden = spec.hidden_size
        self.place = place
        self.norm = LayerNorm(head.norm, spec.hidden_size, spec.norm_eps, head.norm_bias, place) if head.norm else None

    @property
    def weight_bytes(self) -> int:
        numbers = self.hidden * (self.hidden + self.head.num_labels + self.head.dense_bias) + self.head.num_labels
        return 4 * numbers + (0 if self.norm is None else self.norm.weight_bytes)

    def load(self, weights: WeightSource) -> None:
        head, labels = self.head, self.head.num_labels
        self.dense = self._taken(weights, f"{head.dense}.weight", self.hidden, self.hidden)
        self.dense_bias = self._taken(weights, f"{head.dense}.bias", self.hidden) if head.dense_bias else None
        self.output = self._taken(weights, f"{head.output}.weight", labels, self.hidden)
        self.output_bias = self._taken(weights, f"{head.output}.bias", labels)
        if self.norm is not None:
            self.norm.load(weights)

    def _taken(self, weights: WeightSource, name: str, *shape: int) -> Tensor:
        into = self.place.empty(*shape)
        weights.take(name, into, shape=shape)
        return into.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        text = hidden.float().mean(0) if self.head.mean else hidden[0].float()  # [hidden]
        x = F.linear(text[None], self.dense, self.dense_bias)  # [1, hidden]
        x = x.tanh() if self.head.activation == "tanh" else gelu_with_torch(x, self.head.activation, torch.float32)
        if self.norm is not None:
            x = self.norm(x).float()
        return F.linear(x, self.output, self.output_bias)[0]
