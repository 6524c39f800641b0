"""Sources of settings, and the errors for invalid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remuda.cli.deploy import given_parameters
from remuda.cli.rendering.results import config_rows
from remuda.config.declaration import flag, is_secret_arn, key, variable
from remuda.config.settings import SETTINGS, Settings
from remuda.config.sources import load, read_private_key
from remuda.domain.errors import UserError
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, UsageClass

SECRET = "ghp_s3cret"


class SettingsFile:
    """A settings file in an empty directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, text: str, flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> Settings:
        self.path.write_text(text, encoding="utf-8")
        return load(flags or {}, environ=environ or {}, file=self.path)

    def refuse(self, text: str) -> UserError:
        with pytest.raises(UserError) as refused:
            self.load(text)
        return refused.value


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SettingsFile:
    monkeypatch.chdir(tmp_path)
    return SettingsFile(tmp_path / "settings.toml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refuse(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> UserError:
    with pytest.raises(UserError) as refused:
        load(flags or {}, environ=environ or {})
    return refused.value


# Precedence -------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_default() -> None:
    loaded = load({}, environ={})
    assert loaded == Settings()
    assert loaded.origins == {}
    assert not loaded.given("idle_time_sec")


def test_priority_is_flag_environment_file_default(file: SettingsFile) -> None:
    in_file = "idle-time-sec = 10\nmax-uses = 10\nmax-age-sec = 10\n"
    environ = {"REMUDA_IDLE_TIME_SEC": "20", "REMUDA_MAX_USES": "20"}
    loaded = file.load(in_file, {"idle_time_sec": "30"}, environ)
    names = ("idle_time_sec", "max_uses", "max_age_sec", "release_time_sec")
    assert [(getattr(loaded, name), loaded.origins.get(name)) for name in names] == [
        (30, "--idle-time-sec"),
        (20, "REMUDA_MAX_USES"),
        (10, "file: max-age-sec"),
        (300, None),
    ]
    assert [loaded.given(name) for name in names] == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("run_id", "GITHUB_RUN_ID", "123"),
        ("run_attempt", "GITHUB_RUN_ATTEMPT", 4),
        ("github_scope", "GITHUB_REPOSITORY", "octo/repo"),
        ("github_api_url", "GITHUB_API_URL", "https://api.github.com"),
    ],
)
def test_variables_of_github_are_used_unless_those_of_remuda_are_set(name: str, source: str, value: Any) -> None:
    loaded = load({}, environ={source: str(value)})
    assert (getattr(loaded, name), loaded.origins[name]) == (value, source)
    other = {"github_scope": "octo/other", "github_api_url": "http://localhost:8080/api"}.get(name, "7")
    both = load({}, environ={source: str(value), variable(name): other})
    assert (str(getattr(both, name)), both.origins[name]) == (other, variable(name))


@pytest.mark.parametrize(
    "address", ["nonsense", "http://h:port", "http://h:999999", "http://[", "ftp://h", "http:///x", "http://h/\0"]
)
def test_an_invalid_url_is_rejected(address: str) -> None:
    with pytest.raises(UserError, match="--github-api-url must be a URL") as caught:
        load({"github_api_url": address}, environ={})
    assert caught.value.field == "--github-api-url"


@pytest.mark.parametrize("token", ["\u00e9", "two words", "a\nb"])
def test_an_invalid_token_is_rejected_and_not_shown(token: str) -> None:
    with pytest.raises(UserError) as caught:
        load({}, environ={"REMUDA_GITHUB_TOKEN": token})
    assert token not in caught.value.message


def test_the_token_of_the_workflow_is_not_used() -> None:
    assert load({}, environ={"GITHUB_TOKEN": SECRET}).github_token is None


def test_an_empty_variable_counts_as_unset(file: SettingsFile) -> None:
    assert file.load("max-uses = 10", environ={"REMUDA_MAX_USES": ""}).max_uses == 10


def test_an_empty_flag_is_not_ignored() -> None:
    assert refuse({"instance_count": ""}, {"REMUDA_INSTANCE_COUNT": "3"}).field == "--instance-count"


def test_flag_variable_and_key_follow_from_the_name() -> None:
    assert (flag("idle_time_sec"), variable("idle_time_sec"), key("idle_time_sec")) == (
        "--idle-time-sec",
        "REMUDA_IDLE_TIME_SEC",
        "idle-time-sec",
    )


def test_an_error_names_the_source_of_the_value(file: SettingsFile) -> None:
    assert refuse({"max_uses": "0"}).field == "--max-uses"
    assert refuse(environ={"REMUDA_MAX_USES": "0"}).field == "REMUDA_MAX_USES"
    assert refuse(environ={"GITHUB_RUN_ID": "1 2"}).field == "GITHUB_RUN_ID"
    assert file.refuse("max-uses = 0").field == "max-uses"


# The file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_chosen_by_argument_variable_or_default_name(tmp_path: Path) -> None:
    (tmp_path / "remuda.toml").write_text("max-uses = 1")
    (tmp_path / "other.toml").write_text("max-uses = 2")
    assert load({}, environ={}).max_uses == 1
    assert load({}, environ={"REMUDA_CONFIG": "other.toml"}).max_uses == 2
    named = load({}, environ={"REMUDA_CONFIG": "missing.toml"}, file=tmp_path / "other.toml")
    assert named.max_uses == 2


@pytest.mark.parametrize("name", ["missing.toml", "."], ids=["missing", "a folder"])
def test_an_unreadable_named_file_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match="cannot be read") as refused:
        load({}, environ={}, file=Path(name))
    assert refused.value.field == "config"
    assert "--config" in refused.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "max-uses = ",
        "= 5",
        "[",
        "max-uses = 1\nmax-uses = 2",
        "max-uses = 1__0",
        "pool = " + "[" * 100_000,
        "max-uses = " + "1" * 5_000,
        '{"max-uses": 1}',
    ],
    ids=lambda text: text[:20],
)
def test_invalid_toml_is_reported_with_the_file(file: SettingsFile, text: str) -> None:
    error = file.refuse(text)
    assert "settings.toml is not TOML" in error.message
    assert (error.field, "\n" in error.message) == ("config", False)


def test_a_file_that_is_not_utf8_is_not_toml(file: SettingsFile) -> None:
    file.path.write_bytes(b"pool = '\xff\xfe'")
    with pytest.raises(UserError, match="is not TOML"):
        load({}, environ={}, file=file.path)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("idle-time = 5", "did you mean idle-time-sec?"),
        ("instance_count = 5", "did you mean instance-count?"),
        ("zzz = 5", "docs/reference/settings.md lists the settings"),
        ("[nested]\npool = 'x'", "write its settings at the top of the file, without [nested]"),
    ],
)
def test_an_unknown_key_is_reported_with_the_closest_one(file: SettingsFile, text: str, fix: str) -> None:
    assert fix in file.refuse(text).fix


def test_a_long_unknown_key_is_truncated(file: SettingsFile) -> None:
    assert len(file.refuse(f"{'x' * 10_000} = 5").message) < 300


@pytest.mark.parametrize("field", list(SETTINGS))
@pytest.mark.parametrize("value", ["true", "[[1]]", "1979-05-27", '{a = "s3cret"}'])
def test_a_value_of_the_wrong_type_is_rejected_for_every_setting(file: SettingsFile, field: str, value: str) -> None:
    if SETTINGS[field].kind.is_boolean and value == "true":
        assert getattr(file.load(f"{key(field)} = true"), field) is True
        return
    error = file.refuse(f"{key(field)} = {value}")
    assert error.field == key(field)
    assert error.fix or "must be" in error.message
    assert len(error.message) < 300


def test_classes_may_be_a_table_or_json(file: SettingsFile) -> None:
    wanted = (ResourceClass(name="small", cpu=1, memory_mib=512),)
    table = file.load("[resource-class-config.small]\ncpu = 1\nmmem = 512")
    json_text = load({"resource_class_config": '{"small": {"cpu": 1, "mmem": 512}}'}, environ={})
    assert table.resource_class_config == json_text.resource_class_config == wanted
    assert load({}, environ={}).resource_class_config == DEFAULT_CLASSES


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", "5", '{"large": 1}', '{"large": {"cpu": 1}}', "[" * 100_000, "x" * 10_000]
)
def test_malformed_classes_are_rejected(text: str) -> None:
    error = refuse({"resource_class_config": text})
    assert error.field == "--resource-class-config"
    assert '{"large": {"cpu": 2, "mmem": 4096}}' in error.fix or "integer" in error.fix
    assert len(error.message) < 300


def test_runner_sets_may_be_tables_or_json_and_get_the_scope_of_the_pool(file: SettingsFile) -> None:
    table = file.load(
        'github-scope = "acme/app"\n[[runner-sets]]\nname = "large"\nlabels = ["remuda", "large"]\nmax = 4\n'
        '[[runner-sets.windows]]\ncron = "* 9-17 * * 1-5"\nhot = 1\n'
    )
    windows = '[{"cron": "* 9-17 * * 1-5", "hot": 1}]'
    written = f'[{{"name": "large", "labels": ["remuda", "large"], "max": 4, "windows": {windows}}}]'
    json_text = load({}, environ={"REMUDA_RUNNER_SETS": written, "REMUDA_GITHUB_SCOPE": "acme/app"})
    assert table.runner_sets == json_text.runner_sets
    assert [item.scope for item in table.runner_sets] == ["acme/app"]
    assert load({}, environ={"REMUDA_RUNNER_SETS": ""}).runner_sets == ()
    error = refuse({}, {"REMUDA_RUNNER_SETS": '[{"name": "large", "labels": ["remuda"], "max": 0}]'})
    assert (error.field, error.message) == ("REMUDA_RUNNER_SETS", "runner-sets[0]: max is 0")
    assert error.fix == "give an integer from 1 to 1000"


def test_types_may_be_a_list_in_the_file(file: SettingsFile) -> None:
    assert str(file.load('allowed-instance-types = ["c*", "m6i.large"]').allowed_instance_types) == ("c* m6i.large")


def test_a_run_id_may_be_a_number_in_the_file(file: SettingsFile) -> None:
    assert file.load("run-id = 123").run_id == "123"


# Paths and scripts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  ", "x" * 5_000, "a\0b"], ids=["empty", "blank", "long", "nul"])
def test_an_invalid_directory_is_rejected(text: str) -> None:
    """An empty one would be the current directory, which `down --purge` would remove."""
    error = refuse({"dir": text})
    assert error.field == "--dir"
    assert len(error.message) < 300


def test_the_content_of_a_named_file_is_what_was_written(tmp_path: Path) -> None:
    """`deploy` passes the written text to the stack, which cannot read the file."""
    text = '[{"name": "gpu", "labels": ["gpu"], "max": 1}]'
    (tmp_path / "sets.json").write_text(text)
    settings = load({"runner_sets": f"@{tmp_path}/sets.json"}, environ={})
    assert [item.name for item in settings.runner_sets] == ["gpu"]
    assert given_parameters(settings)["RunnerSets"] == text


def test_a_script_may_be_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "boot.sh").write_text("echo hello")
    assert load({"pre_runner_script": "echo hi"}, environ={}).pre_runner_script == "echo hi"
    assert load({"pre_runner_script": "@boot.sh"}, environ={}).pre_runner_script == "echo hello"


@pytest.mark.parametrize("text", ["@missing.sh", "@.", "@" + "x" * 9_999, "@a\0b", "x" * 10_001])
def test_an_invalid_script_is_rejected(text: str) -> None:
    error = refuse({"pre_runner_script": text})
    assert error.field == "--pre-runner-script"
    assert len(error.message) < 300


# Secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_never_shown(file: SettingsFile) -> None:
    loaded = file.load(f'github-token = "{SECRET}"')
    assert loaded.github_token is not None
    assert loaded.github_token.text == SECRET
    shown = [repr(loaded), str(loaded), repr(config_rows(loaded))]
    assert not any(SECRET in text for text in shown)
    assert config_rows(loaded)["github-token"] == {"value": "(hidden)", "source": "file: github-token"}


@pytest.mark.parametrize("text", [f'["{SECRET}"]', f'{{a = "{SECRET}"}}'])
def test_an_error_about_a_secret_does_not_show_it(file: SettingsFile, text: str) -> None:
    error = file.refuse(f"github-token = {text}")
    assert SECRET not in error.message + error.fix + repr(error) + repr(error.__cause__)


def test_an_error_about_another_setting_does_not_show_a_secret(file: SettingsFile) -> None:
    error = file.refuse(f'github-token = "{SECRET}"\nmax-uses = 0')
    assert SECRET not in error.message + error.fix + repr(error)


def test_config_shows_each_setting_with_its_source() -> None:
    rows = config_rows(load({"usage_class": "spot"}, environ={}))
    assert set(rows) == {key(name) for name in SETTINGS}
    assert rows["usage-class"] == {"value": UsageClass.SPOT.value, "source": "--usage-class"}
    assert rows["github-token"]["value"] is None
    assert rows["allowed-instance-types"]["value"] == "*"
    assert rows["resource-class-config"]["value"]["large"] == {"cpu": 2, "mmem": 4_096}


# Scale-down -------------------------------------------------------------------------------------------------------


def test_variables_of_terraform_aws_github_runner_are_accepted() -> None:
    environ = {
        "ENVIRONMENT": "ci",
        "SCALE_DOWN_CONFIG": '[{"cron": "* * 9-17 * * 1-5", "timeZone": "europe/berlin", "idleCount": 2}]',
        "MINIMUM_RUNNING_TIME_IN_MINUTES": "1.5",
        "RUNNER_BOOT_TIME_IN_MINUTES": "7",
    }
    settings = load({}, environ=environ)
    policy = settings.scale_down_policy
    assert (settings.environment, policy.minimum_min, policy.boot_min) == ("ci", 1.5, 7)
    assert [(window.idle_count, window.eviction) for window in policy.windows] == [(2, "oldest_first")]


def test_variables_of_remuda_have_priority_over_those_of_terraform() -> None:
    loaded = load({}, environ={"ENVIRONMENT": "theirs", "REMUDA_ENVIRONMENT": "ours"})
    assert loaded.environment == "ours"
    assert loaded.origins["environment"] == "REMUDA_ENVIRONMENT"


def test_the_file_has_a_table_for_scale_down(file: SettingsFile) -> None:
    text = """
    [scale_down]
    environment = "ci"
    idle_scope = "owner"
    max_removals_per_cycle = 20
    [[scale_down.idle_config]]
    cron = "* 9-17 * * 1-5"
    timeZone = "Asia/Kolkata"
    idleCount = 3
    evictionStrategy = "newest_first"
    """
    loaded = file.load(text)
    policy = loaded.scale_down_policy
    assert loaded.environment == "ci"
    assert (policy.idle_scope, policy.max_removals, policy.windows[0].idle_count) == ("owner", 20, 3)
    assert config_rows(loaded)["idle-config"]["value"] == [
        {"cron": "* 9-17 * * 1-5", "timeZone": "Asia/Kolkata", "idleCount": 3, "evictionStrategy": "newest_first"}
    ]


def test_an_unknown_key_in_the_scale_down_table_is_rejected(file: SettingsFile) -> None:
    error = file.refuse("[scale_down]\nidle_confg = []")
    assert "idle_confg" in error.message
    assert error.fix == "did you mean idle_config?"
    assert file.refuse("scale_down = 1").field == "scale_down"


def test_an_error_in_a_terraform_variable_names_the_variable() -> None:
    error = refuse(environ={"SCALE_DOWN_CONFIG": '[{"cron": "not a cron", "idleCount": 1}]'})
    assert error.field == "SCALE_DOWN_CONFIG"
    assert "idle-config[0]: cron is 'not a cron'" in error.message


# Credentials: tokens, private keys, files and ARNs of secrets ---------------------------------------------------------


PEM = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n"
ARN = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda/ci/github-AbCdEf"


def test_pem_text_is_returned_unchanged():
    assert read_private_key(PEM) == PEM
    assert read_private_key("") == ""


def test_a_pem_file_is_read(tmp_path: Path):
    file = tmp_path / "app.pem"
    file.write_text(PEM)
    assert read_private_key(str(file)) == PEM


@pytest.mark.parametrize("value", ["/nowhere/app.pem", "s3cret-that-is-no-key", "x" * 5_000, "a\0b"])
def test_an_unreadable_key_is_rejected_without_quoting_it(value: str):
    with pytest.raises(UserError) as refused:
        read_private_key(value)
    assert "neither PEM text nor the path of a readable file" in refused.value.message
    assert value not in refused.value.message


def test_a_file_that_is_not_pem_is_rejected(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(UserError, match="not PEM"):
        read_private_key(str(file))


def test_the_arn_of_a_secret_is_accepted():
    assert is_secret_arn(ARN)
    settings = load({}, environ={"REMUDA_GITHUB_TOKEN": ARN, "REMUDA_GITHUB_APP_KEY": ARN})
    assert settings.github_token is not None
    assert settings.github_token.text == ARN


@pytest.mark.parametrize("name", ["REMUDA_GITHUB_TOKEN", "REMUDA_GITHUB_APP_KEY"])
def test_the_arn_of_another_resource_is_rejected(name: str):
    with pytest.raises(UserError) as refused:
        load({}, environ={name: "arn:aws:s3:::bucket"})
    assert "a secret's ARN has the form" in refused.value.message
    assert refused.value.field == name
