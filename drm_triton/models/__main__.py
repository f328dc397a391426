"""Write docs/models.md from the docstrings and the options of the models.

python -m drm_triton.models > docs/models.md
"""

import dataclasses
import inspect
from typing import Any

from drm_triton.models import MODELS, model_class
from drm_triton.models.configs import CONFIGS, ModelConfig
from drm_triton.options import option_row
from drm_triton.recommender import ItemRecommender

PAGE = """# Models

<!-- Written by `python -m drm_triton.models`, from the docstrings and the options of the models. -->

Besides [DRM](objective.md), drm-triton has the eight baselines of [the paper](https://arxiv.org/abs/2008.13141) and
strong models of today. All have the same commands, the same run directory and the same methods, so that they can be
compared fairly ([comparing](comparing.md)):

```sh
drm-triton train ratings --model ease --regularization 100 --out runs/ease
drm-triton evaluate runs/ease --on test
drm-triton recommend runs/ease --user ann
drm-triton tune ratings --model wmf --trials 5 --out studies/wmf
```

```python
import polars as pl
from drm_triton import Dataset
from drm_triton.models import EASE, load

data = Dataset.from_frame(pl.read_csv("ratings.csv"))
model = EASE(regularization=100.0).fit(data)
print(model.recommend(["ann"], k=10))
model.save("ease")
model = load("ease")  # whatever the kind of model
```

A *factor model* has a vector for each user and each item. An *item-item model* has weights between items, and scores an
item by the sum of the weights from the user's items. Before training, a model states the memory that it needs, and
refuses if it is not there. The same seed gives the same model, bit for bit, with any number of threads.

"""
COMMON = """## Options of all models

"""


def page() -> str:
    """Return docs/models.md."""
    rows = [
        [f"[`{name}`](#{name})", f"`{model_class(name).__name__}`", _kind(name)] for name in MODELS if name != "drm"
    ]
    parts = [PAGE + _table(["model", "class", "kind"], rows), COMMON + _options(ModelConfig, [])]
    common = [field.name for field in dataclasses.fields(ModelConfig)]
    for name in (name for name in MODELS if name != "drm"):
        own = _options(CONFIGS[name], common)
        parts.append(f"## {name}\n\n{_description(model_class(name))}\n" + (f"\n{own}" if own else ""))
    return "\n".join(parts)


def _kind(name: str) -> str:
    return "item-item" if issubclass(model_class(name), ItemRecommender) else "factors"


def _description(model: type[Any]) -> str:
    """Return the docstring up to its first section, with indented formulas as blocks of code."""
    text = inspect.cleandoc(model.__doc__ or "")
    for heading in ("Parameters", "Examples"):
        text = text.split(f"\n{heading}\n---")[0]
    return text.strip()


def _options(config: type[Any], without: list[str]) -> str:
    rows = [option_row(field) for field in dataclasses.fields(config) if field.name not in without]
    return _table(["option", "default", "values", "paper", "meaning"], rows) if rows else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


if __name__ == "__main__":
    print(page(), end="")
