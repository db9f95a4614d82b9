"""Image classifiers of two kinds against calculations of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from flowrl.rewards.image_classifier import ImageClassifier
from flowrl.types import LoadError
from tests.unit.rewards.networks import PICTURES, PROMPTS, randomise

LABELS = {"id2label": {0: "cat", 1: "dog", 2: "tree"}, "label2id": {"cat": 0, "dog": 1, "tree": 2}}
HALF = [0.5, 0.5, 0.5]  # mean and standard deviation of ViT's image processor


def vit(folder: Path, **settings: object) -> ViTForImageClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = randomise(ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=8, **(LABELS | settings))))
    model.save_pretrained(folder)
    described = {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}, "resample": 2}
    described |= {"do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": HALF, "image_std": HALF}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    return model


def logits(model: torch.nn.Module) -> np.ndarray:
    """float64 [B, 3]: squeezed into the square, between -1 and 1."""
    small = [np.asarray(Image.fromarray(p).resize((24, 24), Image.Resampling.BILINEAR)) for p in PICTURES]
    pixels = torch.from_numpy(np.stack(small) / 255 * 2 - 1).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        return model(pixels).logits.double().numpy()


def scores(folder: Path, **settings: object) -> np.ndarray:
    scorer = ImageClassifier(path=str(folder), device="cpu", batch_size=2, **settings)
    scorer.load()
    return scorer.score(PICTURES, PROMPTS)


def test_probability_and_logit(tmp_path: Path) -> None:
    expected = logits(vit(tmp_path))
    probabilities = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    assert np.ptp(probabilities[:, 1]) > 0.05
    np.testing.assert_allclose(scores(tmp_path, label="dog"), probabilities[:, 1], atol=1e-5)
    np.testing.assert_allclose(scores(tmp_path, label="tree", output="logit"), expected[:, 2], atol=1e-5)


def test_several_labels_a_picture(tmp_path: Path) -> None:
    expected = logits(vit(tmp_path, problem_type="multi_label_classification"))
    np.testing.assert_allclose(scores(tmp_path, label="cat"), 1 / (1 + np.exp(-expected[:, 0])), atol=1e-5)


def test_another_architecture(tmp_path: Path) -> None:
    """A convolutional one, whose batch statistics are part of what it has learnt."""
    vit(tmp_path)  # its image processor
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **LABELS)
    model = randomise(ResNetForImageClassification(config))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 2)
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(scores(tmp_path, label="cat", output="logit"), logits(model)[:, 0], atol=1e-5)


def test_a_class_is_found_by_its_key(tmp_path: Path) -> None:
    """On the Hub keys are sorted as texts: 0, 1, 10, 11, 2."""
    names = {number: f"class {number}" for number in range(12)}
    expected = logits(vit(tmp_path, id2label=names, label2id={name: number for number, name in names.items()}))
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    described["id2label"] = {key: described["id2label"][key] for key in sorted(described["id2label"])}
    file.write_text(json.dumps(described))
    for number in (2, 9, 10):
        found = scores(tmp_path, label=f"class {number}", output="logit")
        np.testing.assert_allclose(found, expected[:, number], atol=1e-5)
    described["id2label"]["7"] = "class 3"
    file.write_text(json.dumps(described))
    with pytest.raises(LoadError, match=r"has 2 classes 'class 3': 3, 7\."):
        ImageClassifier(path=str(tmp_path), label="class 3").load()
    with pytest.raises(LoadError, match=r"Its classes: class 0, class 1, class 2, .*, class 9 \.\.\. \(12 in all\)"):
        ImageClassifier(path=str(tmp_path), label="class 7").load()


def test_a_class_that_it_does_not_know(tmp_path: Path) -> None:
    vit(tmp_path)
    with pytest.raises(LoadError, match=r"has no class 'bird'. Its classes: cat, dog, tree\."):
        ImageClassifier(path=str(tmp_path), label="bird").load()
    with pytest.raises(ValueError, match="output must be probability or logit, got 'softmax'"):
        ImageClassifier(path=str(tmp_path), label="cat", output="softmax")
