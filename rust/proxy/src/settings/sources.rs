//! Flags, variables and a TOML file merged into [`Settings`], with every error at once.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::checks;
use super::declare::Row;
use super::error::{Origin, SettingsError, SettingsErrors};
use super::nearest::nearest;
use super::peer::{self, Fate, PeerFlag};
use super::places;
use super::sense;
use super::table::{Settings, rows};
use super::value::Value;

/// What every variable begins with.
pub(super) const PREFIX: &str = "R3ROUTER_";

/// Beginnings of variables that are no settings: the file's own, those of the plug-in and its agent, of `r3router top`, and those of the tools around the
/// router (make, tests, benchmarks).
const NOT_SETTINGS: [&str; 8] = [
    "R3ROUTER_CONFIG",
    "R3ROUTER_CACHE",
    "R3ROUTER_PEERS",
    "R3ROUTER_PYTHON",
    "R3ROUTER_SGLANG_",
    "R3ROUTER_ADMIN_URL",
    "R3ROUTER_AGENT_",
    "R3ROUTER_PLUGIN",
];

/// Where values come from. Later calls add to earlier ones; the order of calls does not matter for precedence.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    flags: Vec<(String, Json)>,
    env: Vec<(String, String)>,
    file: Option<(PathBuf, String)>,
}

/// Settings, and how they came about.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The values.
    pub settings: Settings,
    /// Where each value that is not the default was written, by TOML key.
    pub origins: BTreeMap<&'static str, Origin>,
    /// Things that a person should know and that do not stop the router.
    pub warnings: Vec<String>,
}

impl Loaded {
    /// A text that begins with `--flag: ` with the place in front where that setting was written, which may be a variable or a line of the file.
    pub fn placed(&self, text: &str) -> String {
        let named = text.strip_prefix("--").and_then(|rest| rest.split_once(": "));
        let found = named.and_then(|(flag, rest)| {
            let (name, origin) = self.origins.get_key_value(&*flag.replace('-', "_"))?;
            let (origin, name) = (origin.clone(), (*name).to_owned());
            Some(SettingsError { origin, name, message: rest.to_owned(), advice: String::new() }.to_string())
        });
        found.unwrap_or_else(|| text.to_owned())
    }
}

impl Sources {
    /// Adds a flag by its TOML key (`max_payload_size`); words as JSON strings, repeated flags as lists.
    #[must_use]
    pub fn flag(mut self, name: impl Into<String>, value: impl Into<Json>) -> Self {
        self.flags.push((name.into(), value.into()));
        self
    }

    /// Adds variables; those without the prefix `R3ROUTER_` are ignored.
    #[must_use]
    pub fn env<K: Into<String>, V: Into<String>>(mut self, variables: impl IntoIterator<Item = (K, V)>) -> Self {
        self.env
            .extend(variables.into_iter().map(|(k, v)| (k.into(), v.into())).filter(|(k, _)| k.starts_with(PREFIX)));
        self
    }

    /// Adds a TOML text that was read from `path`.
    #[must_use]
    pub fn toml(mut self, path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        self.file = Some((path.into(), text.into()));
        self
    }

    /// Adds a TOML file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn file(self, path: &Path) -> Result<Self, SettingsErrors> {
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(self.toml(path, text)),
            Err(e) => Err(SettingsErrors(vec![SettingsError {
                origin: Origin::Flag("--config".to_owned()),
                name: String::new(),
                message: format!("{} cannot be read: {e}", path.display()),
                advice: "give the path of a TOML file".to_owned(),
            }])),
        }
    }

    /// Reads `{"flags": {name: value}, "env": {name: value}, "config": path or null}`, the form in which the command line hands over.
    ///
    /// # Errors
    /// When the text is not of that form, or the file cannot be read.
    pub fn from_json(text: &str) -> Result<Self, SettingsErrors> {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Given {
            #[serde(default)]
            flags: serde_json::Map<String, Json>,
            #[serde(default)]
            env: BTreeMap<String, String>,
            #[serde(default)]
            config: Option<PathBuf>,
        }
        let given: Given = serde_json::from_str(text).map_err(|e| {
            SettingsErrors(vec![SettingsError {
                origin: Origin::Default,
                name: String::new(),
                message: format!("the settings are not the expected JSON: {e}"),
                advice: r#"pass {"flags": {…}, "env": {…}, "config": path or null}"#.to_owned(),
            }])
        })?;
        let config =
            given.config.or_else(|| given.env.get("R3ROUTER_CONFIG").filter(|p| !p.is_empty()).map(PathBuf::from));
        let sources = Self { flags: given.flags.into_iter().collect(), ..Self::default() }.env(given.env);
        match config {
            Some(path) => sources.file(&path),
            None => Ok(sources),
        }
    }

    /// Merges and checks.
    ///
    /// # Errors
    /// Everything that is wrong: unknown names, unreadable values, values out of range, values that contradict each other.
    pub fn load(&self) -> Result<Loaded, SettingsErrors> {
        let mut merge = Merge { rows: rows(), given: BTreeMap::new(), errors: Vec::new(), warnings: Vec::new() };
        if let Some((path, text)) = &self.file {
            merge.add_toml(path, text);
        }
        merge.add_env(&self.env);
        merge.add_flags(&self.flags);
        let settings = Settings::take(&mut merge);
        for row in merge.rows.iter().filter(|r| r.inert) {
            if let Some((origin, _)) = merge.given.get(row.name) {
                merge.warnings.push(format!("{origin}: {}", row.help));
            }
        }
        let origins: BTreeMap<_, _> = merge.given.into_iter().map(|(name, (origin, _))| (name, origin)).collect();
        if merge.errors.is_empty() {
            checks::contradictions(&settings, &origins, &mut merge.errors, &mut merge.warnings);
            sense::check(&settings, &origins, &mut merge.errors, &mut merge.warnings);
            places::check(&settings, &origins, &mut merge.errors, &mut merge.warnings);
        }
        if merge.errors.is_empty() {
            Ok(Loaded { settings, origins, warnings: merge.warnings })
        } else {
            Err(SettingsErrors(merge.errors))
        }
    }
}

/// Values by name, the strongest source last, and what went wrong on the way.
pub(super) struct Merge {
    rows: Vec<Row>,
    given: BTreeMap<&'static str, (Origin, Json)>,
    errors: Vec<SettingsError>,
    warnings: Vec<String>,
}

impl Merge {
    fn add(&mut self, name: &str, origin: Origin, value: Json) {
        let Some(row) = self.rows.iter().find(|r| r.name == name) else {
            if let Some(flag) = peer::find(name) {
                self.add_peer(flag, origin, &value);
                return;
            }
            let near = nearest(name, self.rows.iter().map(|r| r.name));
            let advice = near.and_then(|n| self.rows.iter().find(|r| r.name == n)).map(|row| {
                let written = match &origin {
                    Origin::Flag(_) => row.flag(),
                    Origin::Env(_) => row.variable(),
                    _ => row.name.to_owned(),
                };
                format!("did you mean {written}?")
            });
            self.errors.push(SettingsError {
                origin,
                name: name.to_owned(),
                message: "there is no such setting".to_owned(),
                advice: advice.unwrap_or_else(|| "see `r3router serve --help` for all of them".to_owned()),
            });
            return;
        };
        self.given.insert(row.name, (origin, value));
    }

    /// A flag of the peer that is no setting: nothing, a warning or an error.
    fn add_peer(&mut self, flag: &PeerFlag, origin: Origin, value: &Json) {
        if !flag.asks(value) {
            return;
        }
        match flag.fate {
            Fate::Ignored => self.warnings.push(format!("{origin}: ignored: {}", flag.reason)),
            Fate::Refused => self.errors.push(SettingsError {
                origin,
                name: flag.name.to_owned(),
                message: "not supported".to_owned(),
                advice: flag.reason.to_owned(),
            }),
        }
    }

    fn add_toml(&mut self, path: &Path, text: &str) {
        let table: serde_json::Map<String, Json> = match toml::from_str(text) {
            Ok(table) => table,
            Err(e) => {
                let line = e.span().map_or(0, |span| line_at(text, span.start));
                self.errors.push(SettingsError {
                    origin: Origin::File(path.to_owned(), line),
                    name: String::new(),
                    message: format!("not TOML: {}", e.message()),
                    advice: "write one `key = value` a line, texts in double quotes".to_owned(),
                });
                return;
            }
        };
        for (key, value) in table {
            let line = line_of_key(text, &key);
            self.add(&key.replace('-', "_"), Origin::File(path.to_owned(), line), value);
        }
    }

    fn add_env(&mut self, variables: &[(String, String)]) {
        for (variable, value) in variables {
            if NOT_SETTINGS.iter().any(|tool| variable.starts_with(tool)) {
                continue;
            }
            if is_service_link(variable, value) {
                self.warnings.push(format!(
                    "{variable} was set by Kubernetes for a Service and is no setting; it is ignored \
                     (enableServiceLinks: false in the pod removes it)"
                ));
                continue;
            }
            let name = variable[PREFIX.len()..].to_ascii_lowercase();
            self.add(&name, Origin::Env(variable.clone()), Json::String(value.clone()));
        }
    }

    fn add_flags(&mut self, flags: &[(String, Json)]) {
        for (name, value) in flags {
            let name = name.replace('-', "_");
            let flag = self.rows.iter().find(|r| r.name == name).map_or_else(
                || format!("--{}", name.replace('_', "-")),
                |r| if value == &Json::Bool(false) { format!("--no-{}", name.replace('_', "-")) } else { r.flag() },
            );
            self.add(&name, Origin::Flag(flag), value.clone());
        }
    }

    /// The value of `name`, or `default` when none was given or the given one is wrong (which is kept as an error).
    pub(super) fn take<T: Value>(&mut self, name: &'static str, default: T) -> T {
        let Some((origin, raw)) = self.given.get(name) else { return default };
        let Some(row) = self.rows.iter().find(|r| r.name == name) else { return default };
        let problem = match T::read(raw, row.unit) {
            Ok(value) => match (row.range, value.magnitude(row.unit)) {
                (Some((low, high)), Some(n)) if n < low || n > high => {
                    let unit = row.unit.name();
                    let bounds = if high.is_finite() {
                        format!("between {low}{unit} and {high}{unit}")
                    } else {
                        format!("at least {low}{unit}")
                    };
                    (format!("{} is out of range", quoted(&value.show())), format!("it must be {bounds}"))
                }
                _ => return value,
            },
            Err(message) => (message, format!("expected {}", row.expects)),
        };
        self.errors.push(SettingsError {
            origin: origin.clone(),
            name: name.to_owned(),
            message: problem.0,
            advice: problem.1,
        });
        default
    }
}

fn quoted(value: &Json) -> String {
    match value {
        Json::String(s) => format!("`{s}`"),
        other => format!("`{other}`"),
    }
}

/// Kubernetes gives every pod variables for every Service. One that is named `r3router` or `r3router-decode` makes
/// `R3ROUTER_PORT=tcp://…`, `R3ROUTER_SERVICE_HOST`, `R3ROUTER_DECODE_PORT_30000_TCP_ADDR` and the like.
fn is_service_link(variable: &str, value: &str) -> bool {
    let link = value.starts_with("tcp://") || value.starts_with("udp://");
    let port_part = variable.split_once("_PORT_").is_some_and(|(_, rest)| {
        let mut words = rest.split('_');
        words.next().is_some_and(|n| n.parse::<u16>().is_ok()) && matches!(words.next(), Some("TCP" | "UDP" | "SCTP"))
    });
    variable.ends_with("_PORT") && link
        || port_part
        || variable.ends_with("_SERVICE_HOST")
        || variable.ends_with("_SERVICE_PORT")
        || variable.contains("_SERVICE_PORT_")
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
}

fn line_of_key(text: &str, key: &str) -> usize {
    let is_key = |line: &str| {
        let line = line.trim_start().trim_start_matches(['[', '"', '\'']);
        line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(['=', '"', '\'', '.', ']']))
    };
    text.lines().position(is_key).map_or(0, |n| n + 1)
}
