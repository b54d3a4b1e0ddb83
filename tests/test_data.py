"""Documents, packing, order and batches, against what a reader can count by hand."""

import json
import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from longspan.config import ConfigError, DataConfig
from longspan.engine.data import load_rows, load_tokenizer, read_documents
from longspan.engine.packing import (
    IGNORE,
    Document,
    best_fit,
    collate,
    document_lengths,
    epoch_order,
    pack,
    step_rows,
)
from longspan.engine.tokens import byte_tokenizer

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4 é"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def document(*ids, targets=None):
    mask = np.ones(len(ids), dtype=bool) if targets is None else np.asarray(targets, dtype=bool)
    return Document(np.asarray(ids, dtype=np.int32), mask)


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_split_cuts_the_stream_and_never_crosses_a_border():
    rows = pack([document(1, 2, 3), document(4, 5, 6, 7, 8, 9), document(10)], length=4, packing="split")
    batch = collate(rows, [0, 1], pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["shift_labels"].tolist() == [[2, 3, IGNORE, IGNORE], [6, 7, 8, IGNORE]]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE], [IGNORE, 6, 7, 8]]
    assert (len(rows), rows.dropped_tokens, rows.target_counts.tolist()) == (2, 2, [2, 3])
    assert document_lengths(rows, [0, 1]) == [[3, 1], [4]]


def test_whole_pads_to_the_longest_row_of_the_micro_batch():
    rows = pack([document(1, 2, 3), document(4, 5), document(6, 7, 8)], length=5, packing="whole")
    batch = collate(rows, [0, 1], pad_id=99)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 99, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert batch["shift_labels"].tolist() == [[2, 3, IGNORE, 5, IGNORE], [7, 8, IGNORE, IGNORE, IGNORE]]
    assert document_lengths(rows, [0, 1]) == [[3, 2], [3, 2]]
    assert collate(rows, [1], pad_id=99)["input_ids"].tolist() == [[6, 7, 8]]


def test_masked_tokens_are_seen_but_not_predicted():
    rows = pack([document(1, 2, 3, 4, targets=[1, 0, 1, 1])], length=8, packing="none")
    batch = collate(rows, [0], pad_id=0)
    assert batch["shift_labels"].tolist() == [[IGNORE, 3, 4, IGNORE]]
    assert rows.target_counts.tolist() == [2]


@pytest.mark.parametrize("packing", ["split", "whole", "none"])
def test_target_counts_and_tokens_agree_with_the_batches(packing):
    draw = random.Random(1)
    documents = []
    for _ in range(40):
        size = draw.randrange(1, 17)
        documents.append(document(*(draw.randrange(100) for _ in range(size)), targets=draw.choices([0, 1], k=size)))
    rows = pack(documents, length=16, packing=packing)
    kept = 0
    for row in range(len(rows)):
        batch = collate(rows, [row], pad_id=0)
        assert int((batch["shift_labels"] != IGNORE).sum()) == rows.target_counts[row]
        assert int(batch["position_ids"].eq(0).sum()) == len(rows.lengths(row))
        kept += batch["input_ids"].numel()
    assert kept + rows.dropped_tokens == sum(len(d.ids) for d in documents)


def test_best_fit_takes_the_fullest_row_with_room():
    assert best_fit([5, 7, 3, 2, 3], 10) == [[0, 3, 4], [1, 2]]
    assert best_fit([], 10) == []
    draw = random.Random(0)
    lengths = [draw.randrange(1, 65) for _ in range(500)]
    packed = best_fit(lengths, 64)
    assert sorted(index for row in packed for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= 64 for row in packed)
    assert len(packed) <= 1.02 * sum(lengths) / 64 + 1


@pytest.mark.parametrize(
    ("too_long", "rows", "tokens", "documents"),
    [
        ("drop", [[9]], 5, 1),
        ("keep_start", [[1, 2, 3], [9]], 2, 0),
        ("keep_end", [[3, 4, 5], [9]], 2, 0),
        ("split", [[1, 2, 3], [4, 5], [9]], 0, 0),
    ],
)
def test_documents_that_are_too_long(too_long, rows, tokens, documents):
    packed = pack([document(1, 2, 3, 4, 5), document(9)], length=3, packing="none", too_long=too_long)
    assert [collate(packed, [row], pad_id=0)["input_ids"][0].tolist() for row in range(len(packed))] == rows
    assert (packed.dropped_tokens, packed.dropped_documents) == (tokens, documents)


def test_a_document_that_is_too_long_is_an_error_with_numbers():
    with pytest.raises(ConfigError, match=r"document 1 has 5 tokens, more than data.sequence_length = 3"):
        pack([document(9), document(1, 2, 3, 4, 5)], length=3, packing="whole")
    with pytest.raises(ConfigError, match=r"5 tokens, fewer than one row of data.sequence_length = 8"):
        pack([document(1, 2, 3, 4, 5)], length=8, packing="split")


def test_order_is_a_function_of_seed_and_epoch():
    assert sorted(epoch_order(50, 3, 0, True)) == list(range(50))
    assert not np.array_equal(epoch_order(50, 3, 0, True), epoch_order(50, 3, 1, True))
    assert not np.array_equal(epoch_order(50, 3, 0, True), epoch_order(50, 4, 0, True))
    assert epoch_order(5, 3, 7, False).tolist() == [0, 1, 2, 3, 4]


def test_steps_walk_through_epochs_whatever_their_size():
    one_by_one = [step_rows(at, 1, rows=7, seed=0, shuffle=True)[0] for at in range(21)]
    in_fours = np.concatenate([step_rows(at, 4, rows=7, seed=0, shuffle=True) for at in range(0, 20, 4)])
    assert one_by_one[:20] == in_fours.tolist()
    assert all(sorted(one_by_one[at : at + 7]) == list(range(7)) for at in (0, 7, 14))


def test_bytes_are_ids_and_the_tokenizer_reloads(tmp_path):
    tokenizer = byte_tokenizer()
    text = "héllo\r\n\twörld 漢字 <x>\0"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 264
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == list(text.encode())
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert again.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_text_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n")
    (tmp_path / "a.txt").write_text("öne")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    tokenizer = byte_tokenizer()
    found = list(read_documents(DataConfig(source=str(tmp_path)), tokenizer))
    assert [d.ids.tolist() for d in found] == [[*"öne".encode(), 256], [*b"two\r\n", 256]]
    assert all(d.targets.all() for d in found)
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"c.txt is not UTF-8 text .* byte 2"):
        list(read_documents(DataConfig(source=str(tmp_path)), tokenizer))


def test_messages_train_on_the_assistant_alone(tmp_path):
    source = write_lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    tokenizer = byte_tokenizer()
    rows, training = load_rows(DataConfig(source=source, sequence_length=64), tokenizer)
    batch = collate(rows, [0], pad_id=0)
    targets = batch["shift_labels"][batch["shift_labels"] != IGNORE].tolist()
    assert tokenizer.decode(targets) == "4 é<|end|>yes<|end|>"
    assert training == 1


def test_an_all_zero_assistant_mask_names_its_cause(tmp_path):
    source = write_lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}")
    config = DataConfig(source=source, chat_template=str(plain))
    with pytest.raises(
        ConfigError, match=r"chat.jsonl:1: the assistant mask is all zero, .* no {% generation %} markers"
    ):
        list(read_documents(config, load_tokenizer(config)))
    config = DataConfig(source=write_lines(tmp_path / "user.jsonl", {"messages": CHAT[:1]}))
    with pytest.raises(ConfigError, match=r"roles are \['user'\]"):
        list(read_documents(config, load_tokenizer(config)))


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_and_completion_train_on_the_completion_and_its_end(tmp_path, chat):
    record = {"prompt": CHAT[:1], "completion": CHAT[1:2]} if chat else {"prompt": "2+2=", "completion": "4"}
    config = DataConfig(source=write_lines(tmp_path / "pairs.jsonl", record))
    tokenizer = byte_tokenizer()
    (found,) = read_documents(config, tokenizer)
    assert tokenizer.decode(found.ids[found.targets]) == ("4 é<|end|>" if chat else "4<|end|>")
    assert tokenizer.decode(found.ids) == ("<|user|>2+2?<|end|><|assistant|>4 é<|end|>" if chat else "2+2=4<|end|>")


def test_token_ids_with_and_without_labels(tmp_path):
    source = write_lines(
        tmp_path / "ids.jsonl", {"tokens": [5, 6, 7]}, {"input_ids": [5, 6, 7], "labels": [IGNORE, 6, IGNORE]}
    )
    first, second = read_documents(DataConfig(source=source), byte_tokenizer())
    assert first.ids.tolist() == second.ids.tolist() == [5, 6, 7]
    assert (first.targets.tolist(), second.targets.tolist()) == ([True] * 3, [False, True, False])
    source = write_lines(tmp_path / "bad.jsonl", {"input_ids": [5, 6, 7], "labels": [6, 7, IGNORE]})
    with pytest.raises(ConfigError, match=r"label 6 at 0 is neither the token there \(5\) nor -100"):
        list(read_documents(DataConfig(source=source), byte_tokenizer()))


def test_parquet_reads_like_json_lines(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"text": "one"}, {"text": "two"}]
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "data.parquet"))
    found = list(read_documents(DataConfig(source=str(tmp_path / "data.parquet")), byte_tokenizer()))
    lines = DataConfig(source=write_lines(tmp_path / "data.jsonl", *records))
    assert [d.ids.tolist() for d in found] == [d.ids.tolist() for d in read_documents(lines, byte_tokenizer())]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "there is no such file or folder"),
        ("a.jsonl", "{oops\n", r"a.jsonl:1 is not JSON"),
        ("b.jsonl", '{"txt": "x"}\n', r"b.jsonl:1 has the fields \['txt'\]; expected text"),
        ("c.jsonl", '{"text": 3}\n', "'text' is a int, not a string"),
        ("d.txt", "", "holds no documents"),
        ("e.json", '{"text": "x"}', "must hold a list of objects"),
    ],
)
def test_bad_sources_are_one_clear_error(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig(source=str(tmp_path / name)), byte_tokenizer())


def test_a_tokenizer_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"data.tokenizer = '.*nowhere'"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"data.chat_template = 'no.jinja': there is no such file"):
        load_tokenizer(DataConfig(chat_template="no.jinja"))


def test_the_format_that_is_asked_for_must_be_there(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", {"prompt": "x"})
    with pytest.raises(ConfigError, match=r"has no 'completion', which data.format = 'prompt_completion' needs"):
        list(read_documents(DataConfig(source=source, format="prompt_completion"), byte_tokenizer()))


def test_validation_rows_come_from_the_end(tmp_path):
    source = write_lines(tmp_path / "ids.jsonl", *({"tokens": [n, n]} for n in range(5)))
    config = DataConfig(source=source, sequence_length=2, packing="none", validation_rows=2)
    rows, training = load_rows(config, byte_tokenizer())
    assert (len(rows), training) == (5, 3)
    config.validation_rows = 5
    with pytest.raises(ConfigError, match=r"makes 5 rows .* data.validation_rows = 5 leaves none"):
        load_rows(config, byte_tokenizer())


def test_the_standard_library_is_the_same_every_time():
    config = DataConfig(max_documents=30, sequence_length=1024)
    one, _ = load_rows(config, byte_tokenizer())
    two, _ = load_rows(config, byte_tokenizer())
    assert np.array_equal(one.ids, two.ids) and np.array_equal(one.pieces, two.pieces)
    assert (np.diff(one.offsets) >= 1).all() and one.lengths(0).sum() == 1024
