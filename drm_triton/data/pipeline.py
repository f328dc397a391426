"""From raw interactions to a `Dataset`: read, threshold, de-duplicate, k-core, encode, split.

Polars reads (streaming, only the columns needed) and turns ids into codes, numbered by sorted external id so that the
order of rows cannot matter. An interaction is from then on one integer of 64 bits, user code above, item code below;
sorting these puts duplicates side by side and leaves the rows of a CSR matrix in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.dataset import CSR, Dataset
from drm_triton.data.files import reading
from drm_triton.data.frames import Raw
from drm_triton.data.split import NEEDS_TIME, PAPER_RATIOS, SPLITS, SplitName, check_ratios, split
from drm_triton.errors import InputError
from drm_triton.progress import SILENT, Reporter

# The way Python and everyone else writes a whole number; 007, +7 and -0 would not come back as they were.
WHOLE_NUMBER = r"^(?:0|-?[1-9][0-9]{0,18})$"


@dataclass(frozen=True)
class Options:
    """What to keep and how to split it. See `Dataset.from_frame` for the meaning of each."""

    min_rating: float | None = None
    min_user: int = 1
    min_item: int = 1
    split: SplitName = "random"
    ratios: tuple[float, float, float] = PAPER_RATIOS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"unknown split {self.split!r}: choose one of {', '.join(SPLITS)}")
        check_ratios(self.ratios)
        for name in ("min_user", "min_item"):
            if getattr(self, name) < 0:
                raise InputError(f"{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if self.min_rating is not None and self.min_rating != self.min_rating:
            raise InputError("min-rating must be a number, got NaN")


def build(raw: Raw, options: Options, report: Reporter = SILENT) -> Dataset:
    """Run every step on raw interactions and return the data set, with the statistics of each step in its meta."""
    steps: list[dict[str, Any]] = []

    def record(name: str, rows: int, users: int, items: int) -> None:
        steps.append({"step": name, "interactions": rows, "users": users, "items": items})
        if rows == 0:
            _fail_empty(steps, raw)

    with report.step("read") as step:
        frame = _collect(raw, options)
        step.note(f"{len(frame):,} rows")
    with report.step("filter") as step:
        user_ids, item_ids = (frame[role].unique().sort().alias("id") for role in ("user", "item"))
        record("read", len(frame), len(user_ids), len(item_ids))
        if raw.own_filter:
            name, keep = raw.own_filter
            frame = keep(frame.lazy()).collect()
            record(name, len(frame), frame["user"].n_unique(), frame["item"].n_unique())
        if options.min_rating is not None:
            frame = frame.filter("keep").drop("keep")
        codes = _encode(frame, user_ids, item_ids)
        del frame
        if options.min_rating is not None:
            counts = (_present(codes[role].to_numpy()) for role in ("user", "item"))
            record(f"rating >= {options.min_rating:g}", len(codes), *counts)
        users, items, time = _distinct(codes)
        del codes
        record("one row per user and item", len(users), _present(users), _present(items))
        if max(options.min_user, options.min_item) > 1:
            kept = core(users, items, options.min_user, options.min_item)
            users, items, time = users[kept], items[kept], time if time is None else time[kept]
            name = f"at least {options.min_user} items per user and {options.min_item} users per item"
            record(name, len(users), _present(users), _present(items))
        users, user_ids = _compact(users, user_ids)
        items, item_ids = _compact(items, item_ids)
        step.note(f"{len(users):,} interactions, {len(user_ids):,} users, {len(item_ids):,} items")
    with report.step("split") as step:
        labels = split(users, items, time, options.split, options.ratios, options.seed)
        shape = (len(user_ids), len(item_ids))
        parts = (labels == k for k in range(3))
        train, valid, test = (CSR.from_pairs(users[part], items[part], shape) for part in parts)
        step.note(f"{train.nnz:,} train, {valid.nnz:,} valid, {test.nnz:,} test")
    meta = {"source": "frame", "options": asdict(options), "steps": steps}
    return Dataset(train, valid, test, user_ids.to_frame(), _with_titles(item_ids, raw), meta)


def core(users: NDArray[np.integer], items: NDArray[np.integer], min_user: int, min_item: int) -> NDArray[np.bool_]:
    """Mark the interactions [n] of the largest part where each user has `min_user` and each item `min_item` of them."""
    kept = np.ones(len(users), dtype=bool)
    u, i = users, items
    while True:
        enough = (np.bincount(u) >= min_user)[u] & (np.bincount(i) >= min_item)[i]
        if enough.all():
            return kept
        kept[kept] = enough
        u, i = u[enough], i[enough]


def _collect(raw: Raw, options: Options) -> pl.DataFrame:
    """Read the columns needed: user, item, and as asked keep (rating high enough), rating, time.

    The first pass takes the quick way and leaves a null wherever that did not do. Only if there is one, a careful pass
    follows (blank lines, spaces round numbers, negative ids), and then one that reads ids as the text they are; a null
    that is left is an error in the data.
    """
    schema = _schema(raw)
    _check_needs(raw, schema, options)
    whole = {role: _looks_whole(raw, role) for role in ("user", "item")}
    careful = False
    while True:
        columns = {role: _id(raw, schema[role], role, whole[role], careful) for role in ("user", "item")}
        if "rating" in schema:
            columns["keep"] = _keep(schema["rating"], options.min_rating, careful)
        if raw.own_filter and "rating" in schema:
            columns["rating"] = _number(schema["rating"], careful).cast(pl.Float32)
        if options.split in NEEDS_TIME:
            columns["time"] = _time(raw, schema["timestamp"])
        frame = _run(raw, _concat(raw, drop_blank=careful and raw.text).select(**columns))
        lost = [name for name in columns if name != "rating" and frame[name].null_count()]
        if not lost:  # without a threshold the ratings were only to be verified
            return frame if options.min_rating is not None else frame.drop("keep", strict=False)
        if not careful:
            careful = True
        elif any(whole.get(name) for name in lost):
            whole.update({role: False for role in whole if role in lost})
        else:
            _fail_at(raw, lost[0], columns[lost[0]])


def _check_needs(raw: Raw, schema: Mapping[str, pl.DataType], options: Options) -> None:
    needs = (
        [("rating", f"min-rating {options.min_rating:g}", "leave --min-rating out")]
        if options.min_rating is not None
        else []
    )
    if options.split in NEEDS_TIME:
        needs.append(("timestamp", f"split {options.split!r}", "choose another split"))
    for role, step, otherwise in needs:
        if role not in schema:
            raise InputError(
                f"{step} needs a {role} for each interaction, and {_names(raw)} has no column, or several, recognised "
                f"as such: name it with --{role}, or {otherwise}"
            )


def _run(raw: Raw, query: pl.LazyFrame) -> pl.DataFrame:
    """Collect a query over all files; if that fails, find the file at fault."""
    try:
        with reading(_names(raw)):
            return query.collect(engine="streaming")
    except InputError:
        for part in raw.parts:
            with reading(part.name, part.locate):
                part.frame.collect(engine="streaming")
        raise


def _names(raw: Raw) -> str:
    names = [part.name for part in raw.parts]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _schema(raw: Raw) -> dict[str, pl.DataType]:
    """Types of the columns that all files have; where files disagree the column is read as text."""
    schemas = [part.frame.collect_schema() for part in raw.parts]
    common = [c for c in schemas[0].names() if all(c in s for s in schemas)]
    return {c: _common_type([s[c] for s in schemas]) for c in common}


def _common_type(types: Sequence[pl.DataType]) -> pl.DataType:
    if len(set(types)) == 1:
        return types[0]
    return pl.Int64() if all(t in _SMALL_INTEGERS for t in types) else pl.String()


def _concat(raw: Raw, drop_blank: bool = False) -> pl.LazyFrame:
    schema = _schema(raw)
    frames = [part.frame.select(pl.col(c).cast(dtype) for c, dtype in schema.items()) for part in raw.parts]
    frame = frames[0] if len(frames) == 1 else pl.concat(frames)
    return frame.filter(~pl.all_horizontal(pl.all().is_null())) if drop_blank else frame


def _looks_whole(raw: Raw, role: str) -> bool:
    dtype = _schema(raw)[role]
    if dtype.is_integer() and dtype not in _SMALL_INTEGERS:
        return True
    if not raw.text or dtype != pl.String:
        return False
    return bool(_head(raw, role).str.contains(WHOLE_NUMBER).all())


def _head(raw: Raw, column: str) -> pl.Series:
    with reading(raw.parts[0].name, raw.parts[0].locate):
        return raw.parts[0].frame.select(column).head(1000).collect().to_series().drop_nulls()


_SMALL_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)


def _id(raw: Raw, dtype: pl.DataType, role: str, whole: bool, careful: bool) -> pl.Expr:
    """External ids are Int64 or String; null where an id is missing or, if `whole`, not a plain whole number."""
    column = pl.col(role)
    if dtype in _SMALL_INTEGERS:
        return column.cast(pl.Int64)
    if dtype.is_float():  # pandas makes whole numbers float when one is missing
        return pl.when(column == column.floor()).then(column.cast(pl.Int64, strict=False))
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise InputError(
            f"{_names(raw)} has {role} ids of type {dtype}, which cannot be used: make them whole numbers or text"
        )
    text = column.cast(pl.String)
    if whole:
        # Comparing texts is far quicker than a regular expression, and right but for negative numbers.
        plain = text.str.contains(WHOLE_NUMBER) if careful else (text >= "1") | (text == "0")
        return pl.when(plain).then(text.cast(pl.Int64, strict=False))
    return pl.when(text != "").then(text)


def _number(dtype: pl.DataType, careful: bool) -> pl.Expr:
    column = pl.col("rating")
    return (column.str.strip_chars() if careful and dtype == pl.String else column).cast(pl.Float64, strict=False)


def _keep(dtype: pl.DataType, min_rating: float | None, careful: bool) -> pl.Expr:
    """True or False, and null where the rating is not a number (or, with a threshold, missing)."""
    number = _number(dtype, careful)
    if min_rating is None:
        return pl.when(pl.col("rating").is_null()).then(True).when(number.is_not_nan()).then(True)
    return pl.when(number.is_not_nan()).then(number >= min_rating)


def _time(raw: Raw, dtype: pl.DataType) -> pl.Expr:
    """Time as a number that sorts: unix time as it is, dates in microseconds."""
    column = pl.col("timestamp")
    if dtype.is_temporal():
        return column.cast(pl.Datetime("us")).cast(pl.Int64)
    if dtype.is_float():
        return pl.when(column.is_not_nan()).then(column)
    if dtype != pl.String:
        return column.cast(pl.Int64, strict=False)
    column = column.str.strip_chars()
    head = _head(raw, "timestamp").str.strip_chars()
    if len(head) and head.head(1).cast(pl.Float64, strict=False).null_count() == 0:
        whole = head.str.contains(r"^[+-]?[0-9]+$").all()
        return column.cast(pl.Int64 if whole else pl.Float64, strict=False)
    return pl.coalesce(column.str.to_datetime(form, strict=False, time_unit="us") for form in _DATES).cast(pl.Int64)


# Only forms that mean one thing: 01/02/2020 is January in one country and February in another.
_DATES = ("%Y-%m-%d", *(f"%Y-%m-%d{t}%H:%M{s}{z}" for t in " T" for s in ("", ":%S%.f") for z in ("", "Z")), "%Y/%m/%d")


_PROBLEMS = {
    "user": ("user", "has no usable user id", "correct or remove that row"),
    "item": ("item", "has no usable item id", "correct or remove that row"),
    "keep": (
        "rating",
        "has a rating that is missing or not a number",
        "correct it, name another column with --rating, or ignore ratings with --rating ''",
    ),
    "time": (
        "timestamp",
        "has a time that is neither a number nor like 2020-12-31 23:59:59",
        "correct it, or name another column with --timestamp",
    ),
}


def _fail_at(raw: Raw, column: str, expression: pl.Expr) -> None:
    """Find the first row where `expression` is null and say where it is."""
    role, problem, advice = _PROBLEMS[column]
    for part in raw.parts:
        rows = part.frame.with_row_index("row").filter(expression.is_null())
        if raw.text:
            rows = rows.filter(~pl.all_horizontal(pl.exclude("row").is_null()))
        bad = rows.select("row", role).head(1).collect()
        if len(bad):
            row, value = bad.row(0)
            seen = "" if value is None or value == "" else f" ({value!r})"
            header = " (the header not counted)" if raw.text else ""
            raise InputError(f"row {row + 1:,} of {part.name}{header} {problem}{seen}: {advice}")


def _fail_empty(steps: list[dict[str, Any]], raw: Raw) -> None:
    if len(steps) == 1:
        raise InputError("the input has no interactions: a header without rows, or lists without items")
    before, after = steps[-2], steps[-1]
    own = raw.own_filter is not None and raw.own_filter[0] == after["step"]
    advice = "give --min-user and --min-item in its place" if own else "lower --min-rating, --min-user or --min-item"
    raise InputError(
        f"no interaction is left by the filter {after['step']!r}: before it there were {before['interactions']:,} "
        f"interactions of {before['users']:,} users and {before['items']:,} items; {advice}"
    )


def _encode(frame: pl.DataFrame, user_ids: pl.Series, item_ids: pl.Series) -> pl.DataFrame:
    """Replace external ids by codes: positions in the sorted ids."""
    lazy = frame.lazy()
    for role, ids in (("user", user_ids), ("item", item_ids)):
        table = ids.alias(role).to_frame().with_row_index("code").lazy()
        lazy = lazy.join(table, on=role).drop(role).rename({"code": role})
    return lazy.collect(engine="streaming")


def _distinct(codes: pl.DataFrame) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray | None]:
    """Return users, items and times [n] sorted by user, then item; of repeated pairs the latest stays."""
    pair = (pl.col("user").cast(pl.Int64) * 2**32 + pl.col("item")).alias("pair")
    if "time" in codes.columns:
        frame = codes.select(pair, "time").sort("pair", "time")
        frame = frame.filter(pl.col("pair").ne_missing(pl.col("pair").shift(-1)))
        pairs, time = frame["pair"].to_numpy(), frame["time"].to_numpy()
    else:
        pairs, time = codes.select(pair).to_series().sort().to_numpy(), None
        different = pairs[1:] != pairs[:-1]
        if not different.all():
            pairs = pairs[np.concatenate([[True], different])]
    return (pairs >> 32).astype(np.int32), pairs.astype(np.int32), time  # the upper and the lower half


def _present(codes: NDArray[np.integer]) -> int:
    """Count the different codes."""
    seen = np.zeros(int(codes.max()) + 1 if len(codes) else 0, dtype=bool)
    seen[codes] = True
    return int(np.count_nonzero(seen))


def _compact(codes: NDArray[np.int32], ids: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Renumber codes [n] so that only ids still in use have one; the order of ids stays."""
    used = np.bincount(codes, minlength=len(ids)) > 0
    if used.all():
        return codes, ids
    return (np.cumsum(used, dtype=np.int32) - 1)[codes], ids.filter(pl.Series(used))


def _with_titles(item_ids: pl.Series, raw: Raw) -> pl.DataFrame:
    items = item_ids.to_frame()
    if raw.titles is None:
        return items
    titles = raw.titles.select(pl.col("item").cast(item_ids.dtype, strict=False).alias("id"), "title")
    titles = titles.drop_nulls("id").unique("id", keep="first", maintain_order=True)
    with reading("the titles"):
        return items.lazy().join(titles, on="id", how="left", maintain_order="left").collect()
