"""The tour as a reader meets it: saved, not run, in JupyterLab, trusted or not, light and dark."""

from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "notebooks" / "01_tour.ipynb"

# Of every text that an output shows: its contrast with the ground behind it (WCAG 2), and its words.
CONTRASTS = """() => {
    const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }
    const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number)
    const over = (top, below) => {
        const a = top[3] ?? 1
        return [0, 1, 2].map(i => top[i] * a + below[i] * (1 - a))
    }
    const ground = node => {
        const layers = []
        for (let n = node; n; n = n.parentElement) layers.push(parse(getComputedStyle(n).backgroundColor))
        return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255])
    }
    const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2])
    const found = []
    for (const output of document.querySelectorAll('.jp-RenderedHTMLCommon.jp-OutputArea-output')) {
        const walker = document.createTreeWalker(output, NodeFilter.SHOW_TEXT)
        while (walker.nextNode()) {
            const words = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement
            if (!words || !node.getClientRects().length || node.closest('style, svg')) continue
            const below = ground(node), style = getComputedStyle(node)
            const ink = over(parse(style.color), below)
            const [a, b] = [light(ink), light(below)].sort((x, y) => y - x)
            found.push([(a + 0.05) / (b + 0.05), words.slice(0, 60)])
        }
    }
    return found
}"""

# Outputs wider than the notebook must scroll in boxes of their own.
WIDE = """() => [...document.querySelectorAll('.jp-OutputArea-child')]
    .filter(n => n.getBoundingClientRect().right > innerWidth + 1).map(n => n.innerText.slice(0, 60))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("trusted", [True, False])
def test_the_saved_tour_reads_well(open_notebook, shot, theme, trusted):
    page = open_notebook(TOUR, run=False, trusted=trusted, theme=theme)
    outputs = page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output")
    outputs.first.wait_for()
    kind = f"{theme}-{'trusted' if trusted else 'untrusted'}"
    for words in (
        "deprecate_kwarg",
        "names that may share storage",
        "121 sites",
        "lines new",
        "float64 allows",
    ):
        shot(outputs.filter(has_text=words).first, f"{kind}-{words.replace(' ', '-')}")
    assert outputs.get_by_text("LlamaAttention").count() > 0
    assert outputs.locator("table").count() >= 5
    assert (page.locator(".jp-OutputArea-output svg[role=img]").count() > 0) == trusted
    assert_reads_well(page)


@pytest.mark.parametrize(("theme", "trusted"), [("light", True), ("dark", False)])
def test_the_saved_notebook_of_an_own_fusion_reads_well(open_notebook, shot, theme, trusted):
    page = open_notebook(TOUR.with_name("07_own_fusion.ipynb"), run=False, trusted=trusted, theme=theme)
    outputs = page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output")
    outputs.first.wait_for()
    for words in (
        "linear_plus_linear(hidden",
        "forgets_a_bias gives",
        "different grad modes",
        "takes a part of it",
    ):
        shot(outputs.filter(has_text=words).first, f"{theme}-{words.split()[0]}")
    assert_reads_well(page)


def assert_reads_well(page):
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 200
    poor = [(round(ratio, 2), words) for ratio, words in contrasts if ratio < 4]
    assert poor == []
    assert page.evaluate(WIDE) == []
    assert page.errors == [] and page.offsite == []


def test_the_graph_of_a_layer_is_drawn_where_the_notebook_is_trusted(open_notebook, shot):
    page = open_notebook(TOUR, run=False, trusted=True)
    drawing = page.locator(".jp-OutputArea-output svg[role=img]").first
    drawing.wait_for()
    assert drawing.locator("text", has_text="q_proj").count() > 0
    box = drawing.bounding_box()
    assert box is not None and box["width"] > 300 and box["height"] > 300
    shot(drawing)


def test_the_plan_and_the_diff_of_one_site_can_be_seen_together(open_notebook, shot):
    """The README's picture is what this test keeps (copied to docs/tour.png)."""
    page = open_notebook(TOUR, run=False, trusted=True)
    page.set_viewport_size({"width": 1150, "height": 1000})
    page.keyboard.press("Control+b")  # the list of files away
    page.locator("summary", has_text="model.layers.0.self_attn").first.click()
    page.locator("h2", has_text="What can be fused?").evaluate("h => h.scrollIntoView()")
    opened = page.locator("details[open]", has_text="merged_qkv").first
    opened.wait_for()
    box = opened.bounding_box()
    assert box is not None and box["y"] + box["height"] < 1000 and box["x"] + box["width"] < 1150
    shot(page)


def test_plan_diff_and_verify_show_themselves_in_a_running_notebook(open_notebook, shot):
    page = open_notebook(
        [
            "import fusekit as fk, torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
            "config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60,\n"
            "    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None)\n"
            "model = LlamaForCausalLM(config).eval()",
            "%load_ext fusekit",
            "%fusekit plan model",
            "%fusekit diff model.model.layers[0].mlp",
            "fused = %fusekit apply model\nfused",
            "%fusekit verify model",
            "%fusekit revert fused",
            "%fusekit plan modle",
        ]
    )
    shot(page)
    text = page.locator(".jp-Notebook").inner_text()
    assert "9 sites" in text and "merged_glu" in text
    assert "kernels.act_and_mul" in text
    assert "ok" in text
    assert "modle" in text and "Traceback" not in text
    assert page.errors == [] and page.offsite == []
