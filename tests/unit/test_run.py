"""The launcher's own words; what it starts is tested with real training in `tests/megatron`."""

import pytest

from megatron_hexi import run


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_the_usage(word, capsys):
    with pytest.raises(SystemExit) as end:
        run.main([word])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m megatron_hexi.torchrun ")


@pytest.mark.parametrize(("words", "said"), [([], "no training script given"), (["a.py"], "a.py: no such")])
def test_a_missing_script_is_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run.main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
