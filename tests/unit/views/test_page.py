"""The text of the report's file; what it does in a browser is tested in tests/browser."""

from __future__ import annotations

import json
import math
import re
from importlib import resources

from autopar.views.page import SCRIPTS, STYLES, page


def embedded(text: str) -> str:
    found = re.findall(r'<script type="application/json" id="ui-content">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_content_comes_back_as_it_was() -> None:
    """Breaks when a text in the content ends the script, is changed, or is taken for a place of the template."""
    content = {
        "title": "</script><b>&\"'",
        "words": ["<!-- <script>", "{{css}}", "🦙 \u2028 \ud800", "\\u003c"],
        "n": 1.5,
    }
    text = page(content)
    assert json.loads(embedded(text)) == content
    assert "<" not in embedded(text)
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;&quot;&#x27;</title>" in text
    text.encode("utf-8")


def test_numbers_that_json_has_not_become_null() -> None:
    """Breaks when an infinite gap makes JSON that a browser cannot read."""
    assert json.loads(embedded(page({"gap": math.inf, "rows": [{"x": math.nan, "y": 2}]}))) == {
        "gap": None,
        "rows": [{"x": None, "y": 2}],
    }


def test_equal_contents_give_equal_texts() -> None:
    """Breaks when a time, a path or an order that changes gets into the file."""
    assert page({"title": "a", "words": ["b"]}) == page({"title": "a", "words": ["b"]})


def test_file_needs_nothing_else() -> None:
    """Breaks when a link to another file gets into the template, or a file of the folder is not put in."""
    text = page({})
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']+""", text)
    assert not re.findall(r"@import|url\((?!#)", text)
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)  # names of XML, never asked for
    names = {file.name for file in (resources.files("autopar.views") / "assets").iterdir()}
    assert names == {"page.html", *STYLES, *SCRIPTS}
    assert "{{" not in text.replace("${{", "")
