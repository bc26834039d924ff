"""The dashboard in a real browser, on a real server with a tiny model, while a real script trains it."""

from __future__ import annotations

import gzip
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.serving import KEY, ServerProcess
from tests.server.api.running import RunningServer
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tests.web.browser import PATIENCE_MS, Visit, chromium
from tinsmith import ServiceClient, TrainingClient, types

T = TypeVar("T")

BASE = "tiny/model"
SCRIPT = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VIEWS = {
    "runs": "Runs",
    "{run}": "Run",
    "samples": "Samples",
    "checkpoints": "Checkpoints",
    "playground": "Playground",
    "server": "Server",
}
LIMIT_BYTES = 150_000
NO_KEY = {"x-api-key": ""}

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokenizer = byte_level_bpe()
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096)
    write_folder(folder, tokenizer, {"tokenizer_config.json": {**CHATML_CONFIG, "chat_template": CHAT_TEMPLATE}})
    with ServerProcess(tmp_path_factory.mktemp("state"), {BASE: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def service(server: ServerProcess) -> Iterator[ServiceClient]:
    service = ServiceClient(base_url=server.url, api_key=KEY, display_name=f"a session {SCRIPT}")
    yield service
    aside(service.close("success").result)


@pytest.fixture(scope="module")
def trainer(service: ServiceClient) -> TrainingClient:
    trainer = aside(
        lambda: service.create_lora_training_client(BASE, rank=4, seed=1, user_metadata={"note": SCRIPT}).result()
    )
    step(trainer)
    return trainer


@pytest.fixture
def visitor(server: ServerProcess, browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Comes to the page; at the end it has loaded nothing from elsewhere, and no error was left in its console."""
    visits: list[Visit] = []

    def come(**context: Any) -> Visit:
        visits.append(Visit(browser, server.url, **context))
        return visits[-1]

    yield come
    for visit in visits:
        visit.close()
        assert visit.elsewhere == []
        assert visit.errors == []


@pytest.fixture
def visit(visitor: Callable[..., Visit]) -> Visit:
    """Somebody who is signed in."""
    visit = visitor()
    visit.has_signed_in(KEY)
    return visit


def aside(work: Callable[[], T]) -> T:
    """Playwright runs an event loop in this thread, and our SDK does not let anybody block one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def step(trainer: TrainingClient) -> None:
    datum = types.Datum(types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0] * 3})
    trainer.forward_backward([datum], "cross_entropy")
    aside(trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result)


def place(trainer: TrainingClient) -> str:
    return f"run/{quote(trainer.model_id, safe='')}"


def containing(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))


def chart(page: Page, name: str) -> Any:
    return page.get_by_role("img", name=f"{name}:")


# --- the door --------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_kept_out_and_sees_nothing(trainer: TrainingClient, visitor: Callable[..., Visit]) -> None:
    visit = visitor()
    visit.sign_in("tml-of-nobody")
    expect(visit.page.get_by_role("alert")).to_contain_text("unknown or was revoked. tinsmith keys create, run where")
    expect(visit.page.get_by_role("alert").locator("code")).to_have_text("tinsmith keys create")
    expect(visit.page.get_by_role("navigation")).to_be_hidden()
    visit.go("checkpoints")
    expect(visit.page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert visit.page.get_by_role("table").count() == 0
    assert [response.status for response in visit.loaded if "/web/" not in response.url] == [200, 401]
    visit.forgive("401")


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/api/overview",
        "/dashboard/api/runs",
        "/dashboard/api/runs/{run}/series",
        "/dashboard/api/runs/{run}/points?name=loss",
        "/dashboard/api/samples",
        "/dashboard/api/keys",
        "/api/v1/checkpoints",
        "/v1/models",
    ],
)
def test_no_endpoint_of_the_page_gives_anything_without_a_key(
    server: ServerProcess, trainer: TrainingClient, path: str
) -> None:
    path = path.format(run=trainer.model_id)
    assert server.call("GET", path).status == 200
    answer = server.call("GET", path, headers=NO_KEY)
    assert answer.status == 401
    assert trainer.model_id.encode() not in answer.body


def test_a_key_is_remembered_for_the_tab_or_for_the_device(visitor: Callable[..., Visit]) -> None:
    visit = visitor()
    visit.page.goto(visit.url)
    kept = "[sessionStorage.getItem('tinsmith.key'), localStorage.getItem('tinsmith.key')]"
    visit.sign_in(KEY)
    expect(visit.page.get_by_role("heading", name="Runs")).to_be_visible()
    assert visit.page.evaluate(kept) == [KEY, None]
    visit.page.get_by_role("button", name="Sign out").click()
    assert visit.page.evaluate(kept) == [None, None]
    visit.page.get_by_label("Stay signed in").check()
    visit.page.get_by_label("API key").fill(KEY)
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("heading", name="Runs")).to_be_visible()
    assert visit.page.evaluate(kept) == [None, KEY]


def test_a_key_is_made_shown_once_and_revoked_and_its_user_is_back_at_the_door(
    server: ServerProcess, visit: Visit, visitor: Callable[..., Visit]
) -> None:
    visit.go("server")
    visit.page.get_by_label("Name of the new key").fill(f"for a friend {SCRIPT}"[:100])
    visit.page.get_by_role("button", name="Create key").click()
    plain = visit.page.locator(".made code").inner_text()
    assert plain.startswith("tml-")
    friend = visitor()
    friend.sign_in(plain)
    expect(friend.page.get_by_role("heading", name="Runs")).to_be_visible()
    row = visit.page.get_by_role("row", name="for a friend")
    row.get_by_role("button", name="Revoke").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    expect(friend.page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(friend.page.get_by_role("status")).to_contain_text("unknown or was revoked")
    assert server.call("GET", "/dashboard/api/runs", key=plain).status == 401
    visit.page.reload()
    expect(visit.page.get_by_role("row", name="for a friend")).to_be_visible()
    assert plain not in visit.page.content()
    friend.forgive("401")


def test_a_server_without_keys_lets_everybody_in_until_the_first_key_is_made(browser: Browser, tmp_path: Path) -> None:
    with RunningServer(tmp_path) as server, closing(Visit(browser, server.url)) as visit:
        visit.page.goto(visit.url)
        expect(visit.page.get_by_text("No training run yet")).to_be_visible()
        expect(visit.page.get_by_role("button", name="Sign out")).to_be_hidden()
        visit.go("server")
        expect(visit.page.get_by_text("This server works without keys")).to_be_visible()
        assert visit.errors == []
        server.store.keys.create("owner", "the first")
        expect(visit.page.get_by_role("heading", name="Sign in")).to_be_visible()


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_curve_gets_new_points_while_somebody_looks(trainer: TrainingClient, visit: Visit) -> None:
    step(trainer)  # the second, before which there is no speed
    visit.go("runs")
    visit.page.get_by_role("link", name=trainer.model_id.partition(":")[0][:8]).last.click()
    loss = chart(visit.page, "loss")
    expect(loss).to_be_visible()
    for name in ("learning_rate", "grad_norm", "tokens_per_second"):
        expect(chart(visit.page, name)).to_be_visible()
    before = loss.get_attribute("aria-label")
    step(trainer)
    aside(trainer.log_metrics({f"reward {SCRIPT}": 0.25}).result)
    expect(loss).not_to_have_attribute("aria-label", before or "")
    expect(chart(visit.page, f"reward {SCRIPT}")).to_have_attribute("aria-label", containing("0.2500 at"))


def test_a_run_whose_session_has_ended_is_not_active(server: ServerProcess, visit: Visit) -> None:
    own = ServiceClient(base_url=server.url, api_key=KEY)
    run_id = aside(lambda: own.create_lora_training_client(BASE, rank=2).result()).model_id
    visit.go("runs")
    row = visit.page.get_by_role("row").filter(has=visit.page.get_by_title(run_id))
    expect(row.locator(".state")).to_have_text("active")
    aside(own.close("success").result)
    expect(row.locator(".state")).to_have_text("idle")


def test_runs_are_compared_in_the_same_charts(service: ServiceClient, trainer: TrainingClient, visit: Visit) -> None:
    other = aside(lambda: service.create_lora_training_client(BASE, rank=2).result())
    step(other)
    names = [f"{run.model_id[:8]}:{run.model_id.rpartition(':')[2]}" for run in (trainer, other)]
    visit.go("runs")
    for run in (trainer, other):
        visit.page.get_by_label(f"Compare {run.model_id}").check()
    visit.page.get_by_role("button", name="Compare 2 runs").click()
    label = chart(visit.page, "loss")
    for name in names:
        expect(label).to_have_attribute("aria-label", containing(name))
    assert visit.page.locator("figure").first.locator(".swatch").count() == 2


def test_a_chart_zooms_by_dragging_and_goes_back_by_a_double_click(trainer: TrainingClient, visit: Visit) -> None:
    for _ in range(3):
        step(trainer)
    visit.go(place(trainer))
    canvas = chart(visit.page, "loss")
    reset = visit.page.get_by_role("button", name="Reset zoom")
    expect(canvas).to_have_attribute("aria-label", containing(" at "))
    box = canvas.bounding_box()
    visit.page.mouse.move(box["x"] + 100, box["y"] + 50)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 300, box["y"] + 60)
    visit.page.mouse.up()
    expect(reset).to_be_enabled()
    canvas.dblclick()
    expect(reset).to_be_disabled()


def test_the_keyboard_walks_along_a_curve(trainer: TrainingClient, visit: Visit) -> None:
    visit.go(place(trainer))
    rate = chart(visit.page, "learning_rate")
    expect(rate).to_have_attribute("aria-label", containing("0.001000 at"))
    rate.focus()
    visit.page.keyboard.press("Home")
    expect(rate).to_have_attribute("aria-label", containing(" 0.001 at 0"))
    expect(visit.page.locator("figure", has=rate).locator(".where")).to_have_text("0")
    visit.page.get_by_label("Smoothing").fill("0.5")
    visit.page.get_by_label("Log scale").check()
    rate.focus()
    visit.page.keyboard.press("End")
    visit.page.keyboard.press("ArrowLeft")
    expect(rate).to_have_attribute("aria-label", containing(" 0.001 (0.001000) at"))


# --- samples, checkpoints, playground --------------------------------------------------------------------------------


def test_samples_appear_on_top_and_as_text(service: ServiceClient, visit: Visit) -> None:
    tokenizer = byte_level_bpe()
    sampler = aside(lambda: service.create_sampling_client(base_model=BASE).result())
    visit.go("samples")
    for prompt in ("first question", f"second {SCRIPT}"):
        tokens = types.ModelInput.from_ints(tokenizer.encode(prompt).ids)
        aside(sampler.sample(tokens, 1, types.SamplingParams(max_tokens=4, seed=1)).result)
        expect(visit.page.locator(".samples li").first).to_contain_text(prompt)
    expect(visit.page.locator(".samples li").nth(1)).to_contain_text("first question")
    expect(visit.page.locator(".samples li").first).to_contain_text("tokens")
    assert visit.page.evaluate("window.hacked") is None


def test_a_checkpoint_is_downloaded_published_and_deleted(
    server: ServerProcess, trainer: TrainingClient, visit: Visit, tmp_path: Path
) -> None:
    path = aside(trainer.save_state("kept", user_metadata={"note": SCRIPT}).result).path
    resource = f"/api/v1/training_runs/{trainer.model_id}/checkpoints/weights/kept"
    visit.go("checkpoints")
    row = visit.page.get_by_role("row", name="kept")
    expect(row).to_contain_text(SCRIPT)
    expect(row).to_contain_text("private")

    with visit.page.expect_download() as downloading:
        row.get_by_role("button", name="Download").click()
    downloading.value.save_as(tmp_path / "archive.tar")
    url = server.call("GET", f"{resource}/archive").json()["url"]
    assert (tmp_path / "archive.tar").read_bytes() == server.call("GET", url.removeprefix(server.url)).body
    assert KEY not in downloading.value.url

    def listed() -> list[Any]:
        found = server.call("GET", "/api/v1/checkpoints").json()["checkpoints"]
        return [checkpoint["public"] for checkpoint in found if checkpoint["tinker_path"] == path]

    row.get_by_role("button", name="Publish", exact=True).click()
    expect(row).to_contain_text("public")
    assert listed() == [True]
    row.get_by_role("button", name="Unpublish").click()
    expect(row).to_contain_text("private")
    assert listed() == [False]

    dialog = visit.page.get_by_role("dialog")
    row.get_by_role("button", name="Delete").click()
    expect(dialog).to_contain_text(path)
    dialog.get_by_role("button", name="Cancel").click()
    assert listed() == [False]
    row.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert listed() == []
    assert visit.page.evaluate("window.hacked") is None


def test_checkpoints_of_one_name_and_two_kinds_have_two_file_names(trainer: TrainingClient, visit: Visit) -> None:
    run = trainer.model_id[:8] + "-" + trainer.model_id.rpartition(":")[2]
    paths = {
        "weights": aside(trainer.save_state("end").result).path,
        "sampler_weights": aside(trainer.save_weights_for_sampler("end").result).path,
    }
    visit.go("checkpoints")
    for kind, path in paths.items():
        row = visit.page.get_by_role("row").filter(has=visit.page.get_by_title(path))
        with visit.page.expect_download() as downloading:
            row.get_by_role("button", name="Download").click()
        assert downloading.value.suggested_filename == f"{run}-{kind}-end.tar"


def test_the_playground_streams_from_two_models(trainer: TrainingClient, visit: Visit) -> None:
    path = aside(trainer.save_weights_for_sampler("to-play").result).path
    visit.go("playground")
    visit.page.get_by_label("Model B").locator("select").select_option(path)
    visit.page.get_by_label("Prompt").fill("The quick brown fox")
    visit.page.get_by_label("Temperature").fill("0")
    run = visit.page.get_by_role("button", name="Run", exact=True)
    for kind, tokens in (("Chat", 12), ("Plain text", 13)):
        visit.page.get_by_label(kind).check()
        visit.page.get_by_label("Max tokens").fill(str(tokens))
        run.click()
        for side in ("A", "B"):
            status = visit.page.get_by_label(f"Model {side}", exact=True).locator(".hint")
            expect(status).to_contain_text(re.compile(rf"{tokens} tokens .* length|stop"))
            expect(visit.page.get_by_label(f"Answer of model {side}")).not_to_be_empty()
        expect(run).to_be_enabled()


def test_an_answer_of_one_token_is_told_as_one(visit: Visit) -> None:
    visit.go("playground")
    visit.page.get_by_label("Model B").locator("select").select_option(BASE)
    visit.page.get_by_label("Prompt").fill("The quick brown fox")
    visit.page.get_by_label("Max tokens").fill("1")
    visit.page.get_by_role("button", name="Run", exact=True).click()
    status = visit.page.get_by_label("Model A", exact=True).locator(".hint")
    expect(status).to_have_text(re.compile("^1 token · .*(length|stop)$"))


def test_an_answer_can_be_stopped(visit: Visit) -> None:
    visit.go("playground")
    visit.page.get_by_label("Model B").locator("select").select_option(BASE)
    visit.page.get_by_label("Prompt").fill("The quick brown fox")
    visit.page.get_by_label("Temperature").fill("0")  # of which this model does not come to an end
    visit.page.get_by_label("Max tokens").fill("3000")
    visit.page.get_by_role("button", name="Run", exact=True).click()
    expect(visit.page.get_by_label("Answer of model A")).not_to_be_empty()
    visit.page.get_by_role("button", name="Stop").click()
    expect(visit.page.get_by_text("stopped")).to_have_count(2)


# --- the page itself -------------------------------------------------------------------------------------------------


def test_the_first_page_is_light(visitor: Callable[..., Visit]) -> None:
    visit = visitor()
    visit.page.goto(visit.url, wait_until="networkidle")
    assert len(visit.loaded) > 10
    assert sum(len(gzip.compress(response.body())) for response in visit.loaded) < LIMIT_BYTES


def test_every_view_fits_a_phone(trainer: TrainingClient, visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    visit.has_signed_in(KEY)
    for view, title in VIEWS.items():
        visit.go(view.format(run=place(trainer)))
        expect(visit.page).to_have_title(f"{title} · Tinsmith")
        visit.page.wait_for_load_state("networkidle")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 320, view
    tabs = visit.page.get_by_role("navigation")
    assert tabs.evaluate("tabs => tabs.scrollWidth <= tabs.clientWidth")
    assert tabs.get_by_role("link").last.evaluate("tab => tab.getBoundingClientRect().right") <= 320


def test_the_long_name_of_a_metric_fits_a_phone(service: ServiceClient, visitor: Callable[..., Visit]) -> None:
    run = aside(lambda: service.create_lora_training_client(BASE, rank=2).result())
    aside(run.log_metrics({200 * "x": 0.25}).result)
    visit = visitor(viewport={"width": 390, "height": 640}, has_touch=True, is_mobile=True)
    visit.has_signed_in(KEY)
    visit.go(place(run))
    expect(chart(visit.page, 200 * "x")).to_be_visible()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_page_is_dark_or_light_as_the_device_says_until_somebody_says_otherwise(
    visitor: Callable[..., Visit],
) -> None:
    visit = visitor(color_scheme="dark")
    visit.page.goto(visit.url)
    lightness = "Math.max(...getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
    assert visit.page.evaluate(lightness) < 60
    visit.page.get_by_role("button", name="Theme: auto").click()
    assert visit.page.evaluate(lightness) > 200
    visit.page.reload()
    assert visit.page.evaluate(lightness) > 200


def test_a_server_that_is_away_is_asked_again_until_it_is_back(visit: Visit) -> None:
    visit.go("samples")
    notice = visit.page.get_by_role("status")
    visit.set_offline(True)
    expect(notice).to_contain_text("not reachable. Trying again in")
    visit.set_offline(False)
    expect(notice).to_be_hidden()
    visit.forgive("ERR_INTERNET_DISCONNECTED")


def test_ten_thousand_points_are_drawn_with_a_few_lines_for_each_pixel(visit: Visit) -> None:
    visit.go("runs")
    found = visit.page.evaluate("""async () => {
        const { Series, decimate, smooth } = await import("/web/series.js");
        const { Chart, Group } = await import("/web/chart.js");
        const xs = Array.from({ length: 10000 }, (_, i) => i);
        const ys = xs.map((x) => (x === 4321 ? 99 : Math.sin(x)));
        const places = decimate(xs, ys, 0, 9999, 400);
        const zoomed = decimate(xs, ys, 2000.5, 2009.5, 400);

        const series = new Series();
        series.append(xs.map((x) => [x, 0, ys[x]]));
        const chart = new Chart("many", new Group(), new AbortController().signal);
        chart.lines = [{ label: "run", place: 0, series }];
        document.querySelector("main").append(chart.element);
        let [path, longest] = [0, 0];
        const { beginPath, lineTo } = CanvasRenderingContext2D.prototype;
        CanvasRenderingContext2D.prototype.beginPath = function () { path = 0; beginPath.call(this); };
        CanvasRenderingContext2D.prototype.lineTo = function (...point) {
            longest = Math.max(longest, ++path);
            lineTo.apply(this, point);
        };
        chart.draw();
        await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
        const label = chart.canvas.getAttribute("aria-label");
        return { places, zoomed, smooth: smooth([1, 1, 5], 0.5), longest, width: chart.canvas.clientWidth, label };
    }""")
    assert len(found["places"]) <= 4 * 402
    assert found["places"] == sorted(set(found["places"]))
    assert {0, 4321, 9999} <= set(found["places"])
    assert found["zoomed"] == [*range(2000, 2011)]
    assert found["smooth"] == pytest.approx([1, 1, 23 / 7])
    assert 100 < found["longest"] < 4 * found["width"]
    assert found["label"].startswith("many: run ")


# --- a chart by itself -----------------------------------------------------------------------------------------------


PAINT = """async ([points, shared, isByTheClock]) => {
    const { Series, clockTicks } = await import("/web/series.js");
    const { Chart, Group } = await import("/web/chart.js");
    const { clock } = await import("/web/format.js");
    const series = new Series();
    series.append(points.map(([x, y]) => [x, 0, y]));
    const byTheClock = { height: 110, formatX: clock, ticksX: clockTicks, least: 0, most: 10 };
    const group = Object.assign(new Group(), shared);
    const chart = new Chart("rate", group, new AbortController().signal, isByTheClock ? byTheClock : {});
    chart.lines = [{ label: "model", place: 0, series }];
    document.querySelector("main").append(chart.element);
    const pen = chart.canvas.getContext("2d");
    let painted;
    const seen = (name, note) => {
        const paint = pen[name];
        pen[name] = (...given) => { note(...given); paint.apply(pen, given); };
    };
    let path;
    seen("scale", () => { painted = { marks: [], dots: [], strokes: [] }; }); // with which it begins, each time
    seen("fillText", (text, x) => painted.marks.push([text, x, pen.measureText(text).width]));
    seen("beginPath", () => { path = []; });
    seen("lineTo", (x, y) => path.push([x, y]));
    seen("stroke", () => painted.strokes.push(path));
    seen("arc", (x, y) => painted.dots.push([x, y]));
    chart.draw();
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    return { ...painted, width: chart.canvas.clientWidth, height: chart.canvas.clientHeight };
}"""
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 20  # the margins of a chart


def painted(visit: Visit, points: Sequence[tuple[float, float]], is_by_the_clock: bool = False, **shared: Any) -> Any:
    """What a chart of these points paints, in pixels. `shared` are properties of its group."""
    visit.go("runs")
    return visit.page.evaluate(PAINT, [points, shared, is_by_the_clock])


@pytest.mark.parametrize(("zoom", "steps"), [(None, [0, 1, 2, 3, 4]), ([1.2, 3.8], [2, 3])])
def test_an_axis_of_steps_has_marks_at_whole_steps_only(visit: Visit, zoom: Any, steps: list[int]) -> None:
    chart = painted(visit, [(step, 0.5) for step in range(5)], zoom=zoom)
    first, last = zoom or (0, 4)
    marks = {text: x for text, x, _ in chart["marks"] if x >= LEFT}
    assert list(marks) == [str(step) for step in steps]
    for step in steps[:-1]:  # the last may have been moved, for want of room
        share = (step - first) / (last - first)
        assert marks[str(step)] == pytest.approx(LEFT + share * (chart["width"] - LEFT - RIGHT))


@pytest.mark.parametrize(("x", "is_by_the_clock"), [(0, False), (7, False), (1e9 + 3.45, True)])
def test_the_label_of_a_point_that_is_alone_stands_under_it(visit: Visit, x: float, is_by_the_clock: bool) -> None:
    chart = painted(visit, [(x, 2.5)], is_by_the_clock)
    [(dot_x, _)] = chart["dots"]
    assert [mark_x for _, mark_x, _ in chart["marks"] if mark_x >= LEFT] == [pytest.approx(dot_x)]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("zoom", [[12.5, 18.5], [9.2, 9.8]])
@pytest.mark.parametrize("smoothing", [0, 0.9])
def test_all_curves_are_seen_in_the_part_that_is_zoomed_into(
    visit: Visit, is_log: bool, zoom: list[float], smoothing: float
) -> None:
    points = [(step, 100.0 if step < 10 else 1 + step % 2) for step in range(30)]
    chart = painted(visit, points, isLog=is_log, zoom=zoom, smoothing=smoothing)
    curves = chart["strokes"][-2:] if smoothing else chart["strokes"][-1:]
    left, right = LEFT, chart["width"] - RIGHT
    heights = [y for curve in curves for y in heights_between(curve, left, right)]
    plot = chart["height"] - TOP - BOTTOM
    assert len(heights) >= 2 * len(curves)
    assert min(heights) == pytest.approx(TOP + plot * 0.05 / 1.1)  # as high as there is room for, and no higher
    assert max(heights) == pytest.approx(TOP + plot * 1.05 / 1.1)


def heights_between(curve: list[tuple[float, float]], left: float, right: float) -> list[float]:
    """Of its points and, as lines are straight, of where it crosses the two edges."""
    crossed = [
        y + (edge - x) / (next_x - x) * (next_y - y)
        for edge in (left, right)
        for (x, y), (next_x, next_y) in itertools.pairwise(curve)
        if x <= edge < next_x
    ]
    return crossed + [y for x, y in curve if left <= x <= right]


@pytest.mark.parametrize("seconds", [7, 140, 1700])
def test_the_axes_of_what_happens_by_the_clock_have_round_marks_that_do_not_touch(visit: Visit, seconds: int) -> None:
    marks = painted(visit, [(1e9 + 3.3, 0), (1e9 + 3.3 + seconds, 0)], is_by_the_clock=True)["marks"]
    values = [text for text, _, _ in marks if ":" not in text]
    assert values == ["0", "5", "10"]
    times = [mark for mark in marks if ":" in mark[0]]
    assert len(times) >= 2
    for (_, x, width), (_, next_x, next_width) in itertools.pairwise(times):
        assert x + width / 2 + 4 < next_x - next_width / 2
    if seconds > 100:
        assert all(text.endswith(("0", "5")) for text, _, _ in times)
    if seconds > 1000:
        assert all(text.endswith(":00") for text, _, _ in times)
