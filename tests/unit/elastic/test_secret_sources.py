"""The secret of an elastic job is taken from its sources in order; its servers listen where they are told."""

from __future__ import annotations

import pytest

from megatron_hexi.elastic import channel
from megatron_hexi.elastic.channel import SECRET_VARIABLE, find_secret, secret_of_rank, tls_context
from megatron_hexi.elastic.entrance import is_here, listen
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes import manifests
from megatron_hexi.lab.testbed.job import free_port
from tests.unit.elastic.test_channel import SECRET


def test_a_secret_is_of_a_file_or_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(HexiError, match=r"no secret .* --secret-file job.secret, made by .*umask 077"):
        find_secret(None, alone=False)
    own = find_secret(None, alone=True)
    assert own != find_secret(None, alone=True)
    monkeypatch.setenv(SECRET_VARIABLE, "of the environment")
    assert find_secret(None, alone=False) == b"of the environment" == secret_of_rank()
    path = tmp_path / "job.secret"
    with pytest.raises(HexiError, match=r"cannot be read .* make it: \(umask 077; openssl rand -hex 32 > "):
        find_secret(str(path), alone=False)
    path.write_text("of the file, far longer\n")
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(HexiError, match=f"others may read or write it .mode 0{mode:o}.; run: chmod 600"):
            find_secret(str(path), alone=False)
    path.chmod(0o600)
    assert find_secret(str(path), alone=False) == b"of the file, far longer"
    path.write_text("short\n")
    with pytest.raises(HexiError, match="the secret has 5 characters, 16 are needed"):
        find_secret(str(path), alone=False)


def test_pods_get_the_secret_under_the_name_that_is_read():
    assert manifests.SECRET_VARIABLE == SECRET_VARIABLE


def test_servers_listen_at_one_address():
    for name, bind, expected in (
        ("localhost", None, {"127.0.0.1", "::1"}),
        ("127.0.0.1", None, {"127.0.0.1"}),
        ("elsewhere.invalid", "127.0.0.3", {"127.0.0.3"}),
        ("elsewhere.invalid", None, {"::", "0.0.0.0"}),
    ):
        with listen(name, 0, bind) as listening:
            assert listening.getsockname()[0] in expected
    with pytest.raises(OSError, match="assign"):
        listen("localhost", 0, "192.0.2.1")
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")
    assert not is_here("elsewhere.invalid")


def test_an_openssl_without_the_cipher_is_named(monkeypatch):
    monkeypatch.setattr(channel, "_CIPHER", "AECDH-NONE")
    with pytest.raises(HexiError, match=r"OpenSSL .* has no anonymous Diffie-Hellman"):
        tls_context.__wrapped__(True)


def test_an_address_that_is_no_node_s_is_refused():
    with pytest.raises(HexiError, match=r"--bind 192\.0\.2\.1: cannot be listened at here"):
        keep_store("localhost", free_port(), SECRET, "192.0.2.1")
