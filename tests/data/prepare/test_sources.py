"""Each source reads its files."""

import json
import zipfile
from pathlib import Path

import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import SOURCES, find_source
from drm_triton.errors import InputError
from tests.data.conftest import ids, titles


def test_every_source_says_what_it_is() -> None:
    for name, source in SOURCES.items():
        assert source.name == name
        assert all((source.summary, source.origin, source.licence, source.layout))


def test_unknown_source_suggests() -> None:
    with pytest.raises(InputError, match="did you mean 'melon'"):
        find_source("mellon")


@pytest.fixture
def playlists(tmp_path: Path) -> Path:
    rows = [
        {
            "tags": ["락"],
            "id": 61281,
            "plylst_title": "여행",
            "songs": [525514, 129701],
            "like_cnt": 71,
            "updt_date": "2013",
        },
        {"tags": [], "id": 10532, "plylst_title": "", "songs": [432406, 525514], "like_cnt": 1, "updt_date": "2014"},
        {"tags": ["x"], "id": 7, "plylst_title": "only tags", "songs": [], "like_cnt": 1, "updt_date": "2014"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows), "utf-8")
    return tmp_path


def test_melon(playlists: Path) -> None:
    data = prepare(find_source("melon"), [playlists / "train.json"], playlists / "out")
    assert data.user_ids.to_list() == [10532, 61281]
    assert data.item_ids.to_list() == [129701, 432406, 525514]
    assert data.n_interactions == 4
    folder = prepare(find_source("melon"), [playlists], playlists / "out2")
    assert folder.checksum == data.checksum
    assert data.item_titles is None


def test_melon_titles_from_song_meta_beside_it(playlists: Path) -> None:
    songs = [
        {"id": 525514, "song_name": "Feelings", "artist_name_basket": ["A", "B"], "issue_date": "20140512"},
        {"id": 129701, "song_name": "봄날", "artist_name_basket": []},
        {"id": 7, "song_name": "in no playlist", "artist_name_basket": ["C"]},
    ]
    (playlists / "song_meta.json").write_text(json.dumps(songs), "utf-8")
    for raw, out in ((playlists / "train.json", "out"), (playlists, "out2")):
        data = prepare(find_source("melon"), [raw], playlists / out)
        assert titles(data) == ["봄날", None, "Feelings – A, B"]
    (playlists / "song_meta.json").write_text('[{"id": 5, ', "utf-8")
    with pytest.raises(InputError, match=r"song_meta\.json"):
        prepare(find_source("melon"), [playlists], playlists / "out3")


@pytest.mark.parametrize("content", ['[{"id": 1, "songs": [1, 2', '{"id": 1}', '[{"id": 1}]', "[]", "no json"])
def test_melon_refuses(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(InputError, match=r"train\.json"):
        prepare(find_source("melon"), [tmp_path / "train.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sketchfab_quotes_and_escapes(tmp_path: Path) -> None:
    lines = [
        "modelname|mid|uid",
        r"a \| b|m1|u1",
        '"two\nlines"|m2|u1',
        'say ""hi""|m3|u2',
        "Ünïcode|m1|u2",
        "Ünïcode|m1|u2",
    ]
    (tmp_path / "model_likes_anon.psv").write_text("\n".join(lines) + "\n", "utf-8")
    data = prepare(find_source("sketchfab"), [tmp_path], tmp_path / "out")
    assert data.user_ids.to_list() == ["u1", "u2"]
    assert data.item_ids.to_list() == ["m1", "m2", "m3"]
    assert titles(data)[:2] == ["a | b", "two\nlines"]
    assert data.n_interactions == 4


def test_sketchfab_finds_the_row_cut_short(tmp_path: Path) -> None:
    (tmp_path / "a.psv").write_text("modelname|mid|uid\nx|m|u\ny|m\n")
    with pytest.raises(InputError, match=r"row 2 of .*a\.psv .* 2 fields"):
        prepare(find_source("sketchfab"), [tmp_path / "a.psv"], tmp_path / "out")


def test_epinion_text_and_its_filter(tmp_path: Path) -> None:
    # items a..e each with three rows of users 1, 2, 3; item f has two rows only; user 4 has too few that count
    rows = [f"{u} {i} 5" for u in (1, 2, 3) for i in "abcde"] + ["1 f 5", "2 f 5", "4 a 3", "4 a 3", "1 a 4"]
    (tmp_path / "ratings_data.txt").write_text("\n".join(rows))
    data = prepare(find_source("epinion"), [tmp_path / "ratings_data.txt"], tmp_path / "out")
    assert data.user_ids.to_list() == [1, 2, 3]
    assert data.item_ids.to_list() == list("abcde")
    assert data.n_interactions == 15
    own = prepare(
        find_source("epinion"),
        [tmp_path / "ratings_data.txt"],
        tmp_path / "out2",
        options=BuildOptions(min_item=2),
        own_filter=False,
    )
    assert own.n_items == 6  # given counts replace the paper's filter


RATINGS = [(1, 10, 5, 100), (1, 20, 3, 200), (2, 10, 4, 300), (2, 30, 4.5, 400)]


@pytest.fixture(params=["ml-20m", "ml-1m", "ml-100k"])
def movielens(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Write the directory of one edition; return its name and path."""
    name = request.param
    folder = tmp_path / name
    folder.mkdir()
    if name == "ml-20m":
        pl.DataFrame(
            RATINGS, schema=["userId", "movieId", "rating", "timestamp"], orient="row", strict=False
        ).write_csv(folder / "ratings.csv")
        (folder / "movies.csv").write_text(
            'movieId,title,genres\n10,"Hello, Dolly! (1969)",Comedy\n30,Amélie,x\n', "utf-8"
        )
    else:
        separator, ratings, films = (
            ("::", "ratings.dat", "movies.dat") if name == "ml-1m" else ("\t", "u.data", "u.item")
        )
        (folder / ratings).write_text("".join(separator.join(map(str, row)) + "\n" for row in RATINGS))
        bar = "::" if name == "ml-1m" else "|"
        lines = f"10{bar}Hello, Dolly! (1969){bar}Comedy\n30{bar}Amélie{bar}x\n"
        (folder / films).write_bytes(lines.encode("latin-1"))
    return name, folder


def test_movielens_as_folder_file_and_zip(movielens: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = movielens
    source = find_source(name)
    data = prepare(source, [folder], tmp_path / "a")
    assert data.user_ids.to_list() == [1, 2]
    assert data.item_ids.to_list() == [10, 30]  # the rating of 3 is left out
    assert titles(data) == ["Hello, Dolly! (1969)", "Amélie"]
    with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"{name}/{file.name}")
    ratings = next(f for f in folder.iterdir() if f.name.startswith(("ratings", "u.data")))
    for k, raw in enumerate([tmp_path / f"{name}.zip", ratings]):
        again = prepare(source, [raw], tmp_path / f"out{k}")
        assert again.checksum == data.checksum
        assert titles(again) == titles(data)
        assert [f["file"] for f in again.meta["files"]] == [raw.name]
    everything = prepare(source, [folder], tmp_path / "b", options=BuildOptions(split="time"))
    assert everything.n_interactions == 4


def test_movielens_knows_lists_when_it_sees_them(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("0 1 2\n")
    with pytest.raises(InputError, match=r"use source lists with `train` .*train.txt and `test`"):
        prepare(find_source("ml-1m"), [tmp_path], tmp_path / "out")


def lists(tmp_path: Path, content: str, **fields: str) -> Dataset:
    (tmp_path / "users.dat").write_text(content)
    return prepare(
        find_source("lists"), [tmp_path / "users.dat"], tmp_path / "out", FileFormat(**fields), overwrite=True
    )


def test_lists(tmp_path: Path) -> None:
    user = lists(tmp_path, "u1 5 6\nu2 7\nu3\n")
    assert ids(user) == (["u1", "u2"], [5, 6, 7])
    count = lists(tmp_path, "2 5 6\n0\n1 7\n", leading="count")
    assert ids(count) == ([0, 2], [5, 6, 7])  # line 1 has no items
    none = lists(tmp_path, "5 6\n\n7\n", leading="none")
    assert ids(none) == ([0, 2], [5, 6, 7])
    commas = lists(tmp_path, "a,5,6\nb,7\n", separator=",")
    assert commas.item_ids.to_list() == [5, 6, 7]
    for name, separator in (("comma", ","), ("tab", "\t"), ("space", "  ")):
        assert lists(tmp_path, f"a{separator}5{separator}6\n", separator=name).item_ids.to_list() == [5, 6]


def test_lists_refuse_to_guess(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`leading=.count.`"):
        lists(tmp_path, "2 5 6\n1 7\n")
    assert lists(tmp_path, "2 5 6\n1 7\n", leading="user").user_ids.to_list() == [1, 2]
    with pytest.raises(InputError, match=r"line 2 of .* begins with '3'"):
        lists(tmp_path, "2 5 6\n3 7\n", leading="count")
