//! The macro that turns one table into the struct, its defaults, its reader and its description.
use serde_json::Value as Json;

use super::quantity::{parse_bytes, parse_duration};
use super::value::Value;

/// The unit of a bare number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// No unit.
    #[default]
    None,
    /// Seconds.
    Secs,
    /// Milliseconds.
    Millis,
    /// Bytes.
    Bytes,
}

impl Unit {
    /// As written in the reference page.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Secs => "s",
            Self::Millis => "ms",
            Self::Bytes => "bytes",
        }
    }
}

/// How often a flag may be given and how many words it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// `--x` and `--no-x`.
    Switch,
    /// `--x VALUE`.
    One,
    /// `--x A B C`, repeatable.
    Many,
    /// `--x URL [PORT]`, repeatable.
    UrlPort,
}

impl Arity {
    /// As written in the schema.
    pub fn name(self) -> &'static str {
        match self {
            Self::Switch => "switch",
            Self::One => "one",
            Self::Many => "many",
            Self::UrlPort => "url_port",
        }
    }
}

/// The description of one setting.
#[derive(Clone, Debug)]
pub struct Row {
    /// TOML key, and the name of the field.
    pub name: &'static str,
    /// Heading in help and reference.
    pub group: &'static str,
    /// What it does.
    pub help: String,
    /// The unit of a bare number.
    pub unit: Unit,
    /// How the flag is written.
    pub arity: Arity,
    /// What stands for the value in help, e.g. `DURATION`.
    pub metavar: &'static str,
    /// What values look like, for errors and the reference.
    pub expects: &'static str,
    /// The accepted names, when there are only some.
    pub choices: &'static [&'static str],
    /// The default, as JSON.
    pub default: Json,
    /// The default of sglang-router 0.3.2, when the flag exists there.
    pub peer: Option<&'static str>,
    /// Smallest and largest number, in `Row::unit`.
    pub range: Option<(f64, f64)>,
    /// Taken so that a launch command need not change, and without effect; the help says why.
    pub inert: bool,
    /// Whether a running router can take a new value.
    pub reloadable: bool,
}

impl Row {
    pub(super) fn new<T: Value>(name: &'static str, group: &'static str, help: &str, default: &T) -> Self {
        Self {
            name,
            group,
            help: help.trim().to_owned(),
            unit: Unit::None,
            arity: T::ARITY,
            metavar: T::METAVAR,
            expects: T::EXPECTS,
            choices: T::CHOICES,
            default: default.show(),
            peer: None,
            range: None,
            inert: false,
            reloadable: false,
        }
    }

    pub(super) fn unit(mut self, unit: Unit) -> Self {
        self.unit = unit;
        self
    }

    pub(super) fn peer(mut self, default: &'static str) -> Self {
        self.peer = Some(default);
        self
    }

    pub(super) fn range(mut self, low: f64, high: f64) -> Self {
        self.range = Some((low, high));
        self
    }

    pub(super) fn inert(mut self) -> Self {
        self.inert = true;
        self
    }

    pub(super) fn reloads(mut self) -> Self {
        self.reloadable = true;
        self
    }

    /// `--max-payload-size`; a switch that is on by default is written `--no-…` in help.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    /// The default as sglang-router writes it: durations and sizes as bare numbers.
    pub fn bare_default(&self) -> Json {
        let Some(text) = self.default.as_str() else { return self.default.clone() };
        let number = |n: f64| if n.fract() == 0.0 { Json::from(n as i64) } else { Json::from(n) };
        let bare = match self.unit {
            Unit::None => None,
            Unit::Secs => parse_duration(text, self.unit).ok().map(|d| number(d.as_secs_f64())),
            Unit::Millis => parse_duration(text, self.unit).ok().map(|d| number(d.as_secs_f64() * 1e3)),
            Unit::Bytes => parse_bytes(text).ok().map(Json::from),
        };
        bare.unwrap_or_else(|| self.default.clone())
    }

    /// `R3ROUTER_MAX_PAYLOAD_SIZE`.
    pub fn variable(&self) -> String {
        format!("{}{}", super::sources::PREFIX, self.name.to_uppercase())
    }
}

/// See the module's text. A row is `name: Type = default; attribute(args); …,` with the help as its doc comment.
macro_rules! settings {
    ($($group:literal => { $( $(#[doc = $help:literal])+ $name:ident : $ty:ty = $default:expr $(; $attr:ident ( $($arg:expr),* ))* , )+ })+) => {
        /// Everything that can be set, checked and typed. [`Settings::default`] is the router without any flag.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Settings {
            $($( $(#[doc = $help])+ pub $name: $ty, )+)+
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($( $name: $default, )+)+ }
            }
        }

        /// The description of every setting, in the order of the help.
        pub fn rows() -> Vec<Row> {
            vec![$($( {
                let default: $ty = $default;
                Row::new(stringify!($name), $group, concat!($($help),+), &default) $(.$attr($($arg),*))*
            }, )+)+]
        }

        impl Settings {
            /// Takes every value from `merge`, which keeps the errors.
            pub(super) fn take(merge: &mut Merge) -> Self {
                Self { $($( $name: merge.take(stringify!($name), $default), )+)+ }
            }

            /// `(name, value)` of every setting as JSON, secrets hidden.
            pub fn values(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$($( (stringify!($name), Value::show(&self.$name)), )+)+]
            }
        }
    };
}
pub(super) use settings;
