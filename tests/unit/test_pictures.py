from base64 import b64decode
from xml.etree import ElementTree

from assets.pictures import ROWS, ttft_picture

SVG = "{http://www.w3.org/2000/svg}"


def row(label, cold=4.0, warm=0.2, hit=512, verdict="proven"):
    times = {"ttft_cold_s": cold, "ttft_warm_s": warm}
    return {"label": label, "hit_tokens": hit, "expected_tokens": 512, "verdict": verdict, **times}


def drawn(rows):
    picture = ttft_picture(rows)
    return ElementTree.fromstring(b64decode(picture.partition("base64,")[2].rstrip(")")))  # noqa: S314 - our own


def test_each_prefix_has_a_bar_for_cold_and_warm_by_one_scale_and_its_hit_share():
    tree = drawn([row("a"), row("<b> & c", cold=2.0, hit=256, verdict="failed")])
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert {"a", "<b> & c", "4.00 s → 200 ms", "✓ 100%", "✗ 50%"} <= set(texts)
    widths = [float(r.get("width")) for r in tree.iter(f"{SVG}rect") if r.get("height") == "9"][2:]
    assert widths[0] == 2 * widths[2]
    assert widths[0] == round(20 * widths[1], 1)


def test_of_many_prefixes_the_slowest_are_drawn():
    tree = drawn([row(f"p{n:03}", cold=float(n + 1)) for n in range(500)])
    labels = [e.text for e in tree.iter(f"{SVG}text") if (e.text or "").startswith("p")]
    assert labels == [f"p{n:03}" for n in range(499, 499 - ROWS, -1)]
    assert "No prefix" in ttft_picture([])
