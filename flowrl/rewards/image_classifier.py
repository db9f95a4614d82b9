"""Any image classifier of transformers: how sure it is of one class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.rewards.networks import NetworkScorer, configuration, dtype_of, image_processor, pretrained, small_files

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.prompts import Prompt

OUTPUTS = ("probability", "logit")


@dataclass(kw_only=True, eq=False)
class ImageClassifier(NetworkScorer):
    """The probability or the logit of `label`, whatever the prompt.

    Args:
        path: a folder or Hub id that `AutoModelForImageClassification` reads.
        label: a class by its name in the model's configuration (`id2label`).
        output: probability, in [0, 1]: softmax over the classes, or a sigmoid if the model was trained with several
            labels a picture. Or the logit, which does not saturate.
    """

    label: str
    output: str = "probability"

    _model: Any = field(init=False, repr=False)
    _image_processor: Any = field(init=False, repr=False)
    _index: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in OUTPUTS:
            raise ValueError(f"output must be {' or '.join(OUTPUTS)}, got {self.output!r}")

    def load(self) -> None:
        """Read the classifier. Raises LoadError, also for a label that it does not know, or has several of."""
        from transformers import AutoConfig, AutoModelForImageClassification

        files = small_files(self.path, self.revision)
        self._index = self._class_of(configuration(AutoConfig, files).id2label)
        self._image_processor = image_processor(files)
        model = pretrained(AutoModelForImageClassification, self.path, self.revision, dtype=dtype_of(self.dtype))
        self._model = self.settled(model)

    def _class_of(self, id2label: dict[int, str]) -> int:
        """The output that is called `label`. The order of a JSON object says nothing: its keys do."""
        from flowrl.types import LoadError

        found = [index for index, name in id2label.items() if name == self.label]
        if len(found) > 1:
            raise LoadError(f"{self.path} has {len(found)} classes {self.label!r}: {', '.join(map(str, found))}.")
        if not found:
            names = [id2label[index] for index in sorted(id2label)]
            known = ", ".join(names[:10]) + (f" ... ({len(names)} in all)" if len(names) > 10 else "")
            raise LoadError(f"{self.path} has no class {self.label!r}. Its classes: {known}.")
        return found[0]

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]."""
        prepared = self._image_processor(images, input_data_format="channels_last", return_tensors="pt")
        logits: Tensor = self._model(prepared.pixel_values.to(self._model.device, self._model.dtype)).logits.float()
        if self.output == "probability":
            several = self._model.config.problem_type == "multi_label_classification"
            logits = logits.sigmoid() if several else logits.softmax(dim=-1)
        return logits[:, self._index]
