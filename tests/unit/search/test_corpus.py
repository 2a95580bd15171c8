"""A corpus on disk: documents by number, errors by line, what is in it by digest."""

from __future__ import annotations

import json

import pytest

from verl.search.corpus import Corpus, title_and_text


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def document(number, text="text"):
    return json.dumps({"id": number, "contents": f'"Title {number}"\n{text}'})


def test_documents_are_found_by_number_also_across_portions_and_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.search.corpus.SCAN_BYTES", 64)
    lines = [document(number, "ü" * number) for number in range(20)]
    path = tmp_path / "c.jsonl"
    path.write_text("\n" + "\n\n".join(lines))  # blank lines, and no line break at the end
    corpus = Corpus(path, tmp_path / "cache")
    assert len(corpus) == 20
    assert [found.id for found in corpus] == [str(number) for number in range(20)]
    assert corpus[7].contents.endswith("ü" * 7)


@pytest.mark.parametrize(
    ("line", "why"),
    [("{broken", "JSONDecodeError"), ('{"id": 1}', "contents"), ('{"id": 1, "contents": 5}', "TypeError")],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, why):
    path = write(tmp_path / "c.jsonl", [document(0), "", line])
    corpus = Corpus(path, tmp_path)
    assert corpus[0].id == "0"
    with pytest.raises(ValueError, match=rf"c\.jsonl, line 3: .*{why}"):
        corpus[1]


def test_what_is_no_corpus_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"retriever\.corpus_path"):
        Corpus(tmp_path / "none.jsonl", tmp_path, "retriever.corpus_path")
    (tmp_path / "c.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"^corpus_path: .*c\.jsonl\.gz"):
        Corpus(tmp_path / "c.jsonl.gz", tmp_path)


def test_the_digest_is_of_the_content_not_of_the_place(tmp_path):
    one, same = (write(tmp_path / name, [document(0)]) for name in ("a.jsonl", "b.jsonl"))
    first, second = Corpus(one, tmp_path), Corpus(same, tmp_path)
    assert first.digest == second.digest
    write(one, [document(0), document(1)])
    changed = Corpus(one, tmp_path)
    assert changed.digest != first.digest
    assert len(changed) == 2


def test_title_and_text():
    assert title_and_text('"Ed Wood (film)"\nEd Wood is') == ("Ed Wood (film)", "Ed Wood is")
    assert title_and_text("no title") == ("", "no title")
