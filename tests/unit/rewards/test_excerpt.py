"""What is shown of texts that others wrote."""

from __future__ import annotations

import time

import pytest

from flowrl.rewards.excerpt import excerpt

GATEWAY = """<!DOCTYPE html>
<html><head><title>502 Bad Gateway</title><style>body { color: red }</style>
<script>if (1 < 2) { alert("x") }</script></head>
<body><!-- a > b --><h1>502 Bad&nbsp;Gateway</h1><hr>nginx &lt;1.27&gt;</body></html>"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (GATEWAY, "502 Bad Gateway 502 Bad Gateway nginx <1.27>"),
        ("<html>\n<h1>Bad gateway\n", "Bad gateway"),
        ("<script>only()</script>", "<script>only()</script>"),
        ("<script>never closed", "<script>never closed"),
        ('\n {"error":\n "a < b > c"}\n', '{"error": "a < b > c"}'),
        ("\x1b[31mred\x1b[0m\x07 &amp; \u202eback", "\ufffd[31mred\ufffd[0m\ufffd &amp; \ufffdback"),
        ("<p>a&#x202e;b", "a\ufffdb"),
        (" \n\t", ""),
        ("", ""),
        ("a b " * 100, "a b " * 49 + "a b…"),
        ("x" * 200, "x" * 200),
    ],
)
def test_is_one_line_that_can_be_read(text: str, shown: str) -> None:
    assert excerpt(text) == shown


@pytest.mark.parametrize(
    "part", ["<", "<script", "<!--", "<a ", "<script></script", "&", "<style><!--", "<script></script "]
)
def test_no_page_takes_long(part: str) -> None:
    started = time.process_time()
    excerpt("<" + part * (64_000 // len(part)))
    assert time.process_time() - started < 0.5
