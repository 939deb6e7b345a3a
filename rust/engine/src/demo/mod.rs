//! The incident, and its cure, on one emulated fleet: the same load in turn through an unbounded router, a peer, and r3router.
//!
//! The fleet is that of the public report: one prefill and one decode engine with four ranks each, 96 requests per GPU outstanding, 54k
//! shared and 3k new prompt tokens, R3 on. The model runs the real sizes and clocks; the wire carries them divided by `scale`, in
//! `scale` times less time ([`crate::emulator::Scale`]). Every column gets a fresh fleet, and its router is a process of its own.
mod column;
mod process;
mod table;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::bounds::Bound;

pub use column::{Column, ColumnKind};

/// How to run it. Token counts are unscaled.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct DemoOptions {
    /// Command that starts r3router's `serve`; flags are appended.
    pub router: Vec<String>,
    /// Command that starts the `sglang-router` wheel; empty leaves its column out.
    pub peer: Vec<String>,
    /// What the peer is called in the table.
    pub peer_name: String,
    /// Factor between the model and the wire.
    pub scale: f64,
    /// Length of a column, seconds of the model.
    pub seconds: f64,
    /// Requests outstanding per GPU (rank).
    pub per_gpu: usize,
    /// Prefill ranks.
    pub prefill: u16,
    /// Decode ranks.
    pub decode: u16,
    /// Prompt tokens that all samples of a family share.
    pub cached_tokens: u32,
    /// Prefixes that there are. 768 samples outstanding in groups of 8 of one prompt, as GRPO draws them, are 96.
    pub families: u32,
    /// Whether the prefixes are in every prefill rank's cache from the start. Weights change and caches are flushed between the steps
    /// of a training, so by default they are not.
    pub warm: bool,
    /// Prompt tokens of one request only, least and most (uniform between).
    pub new_tokens: [u32; 2],
    /// Tokens to generate: median and sigma of their log-normal spread.
    pub output_tokens: u32,
    /// Sigma of the same.
    pub output_sigma: f64,
    /// Most tokens to generate.
    pub output_max: u32,
    /// Release to play.
    pub engine_version: String,
    /// Where the result goes, as JSON.
    pub out: PathBuf,
    /// Columns to run, by their letters; empty runs all.
    pub columns: Vec<String>,
    /// Threads for the fleet and for the client, each.
    pub threads: usize,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self {
            router: Vec::new(),
            peer: Vec::new(),
            peer_name: "sglang-router 0.3.2".to_owned(),
            scale: 15.0,
            seconds: 1_500.0,
            per_gpu: 96,
            prefill: 4,
            decode: 4,
            cached_tokens: 54_000,
            families: 96,
            warm: false,
            new_tokens: [1_800, 4_200],
            output_tokens: 800,
            output_sigma: 0.6,
            output_max: 8_192,
            engine_version: "0.5.23".to_owned(),
            out: PathBuf::from("target/demo.json"),
            columns: Vec::new(),
            threads: 2,
        }
    }
}

/// One thing that the demo must show.
#[derive(Clone, Debug, Serialize)]
pub struct Criterion {
    /// What must hold.
    pub what: String,
    /// What was measured.
    pub measured: String,
    /// Whether it holds.
    pub holds: bool,
}

/// What the demo found.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// The options that it ran with.
    pub options: DemoOptions,
    /// Processor, cores and system.
    pub machine: String,
    /// When it began, UTC.
    pub date: String,
    /// The columns.
    pub columns: Vec<Column>,
    /// The criteria, met or not.
    pub criteria: Vec<Criterion>,
    /// Why columns were left out.
    pub left_out: Vec<String>,
}

impl DemoReport {
    /// Whether every criterion holds.
    pub fn holds(&self) -> bool {
        self.criteria.iter().all(|c| c.holds)
    }

    /// The table as plain text.
    pub fn table(&self) -> String {
        table::render(self)
    }
}

impl DemoOptions {
    /// Least and most of every number.
    pub const BOUNDS: [Bound; 11] = [
        ("scale", 1.0, 1000.0),
        ("seconds", 1.0, 864_000.0),
        ("per_gpu", 1.0, 100_000.0),
        ("prefill", 1.0, 1024.0),
        ("decode", 1.0, 1024.0),
        ("cached_tokens", 0.0, 10_000_000.0),
        ("families", 1.0, 1_000_000.0),
        ("output_tokens", 1.0, 10_000_000.0),
        ("output_sigma", 0.0, 10.0),
        ("output_max", 1.0, 10_000_000.0),
        ("threads", 1.0, 1024.0),
    ];

    /// # Errors
    /// The first number outside of its bounds, or a column that there is none of.
    pub fn check(&self) -> Result<(), String> {
        crate::bounds::check(self, &Self::BOUNDS)?;
        let letters: Vec<&str> = ColumnKind::ALL.iter().map(|kind| kind.letter()).collect();
        match self.columns.iter().find(|c| !letters.contains(&c.as_str())) {
            Some(unknown) => Err(format!("--column {unknown} is none of {}", letters.join(", "))),
            None => Ok(()),
        }
    }
}

/// Runs all columns in turn. `progress` gets a line before each and after each. Writes `out`.
///
/// # Errors
/// A router that does not come up, a port that cannot be had, or a result that cannot be written. Criteria that are not met are no
/// error: they are in the report.
pub fn run(options: &DemoOptions, mut progress: impl FnMut(&str)) -> io::Result<DemoReport> {
    if options.router.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "router is empty; it is the command that starts r3router",
        ));
    }
    options.check().map_err(|message| io::Error::new(io::ErrorKind::InvalidInput, message))?;
    let date = crate::emulator::now_utc();
    let logs = options.out.parent().unwrap_or(Path::new(".")).join("demo-logs");
    std::fs::create_dir_all(&logs)?;
    let mut columns = Vec::new();
    let mut left_out = Vec::new();
    for kind in ColumnKind::ALL {
        if !options.columns.is_empty() && !options.columns.iter().any(|c| c == kind.letter()) {
            continue;
        }
        if kind == ColumnKind::Peer && options.peer.is_empty() {
            left_out.push(format!("({}) {}: not installed", kind.letter(), options.peer_name));
            continue;
        }
        progress(&format!(
            "({}) {}: {:.0} s of the fleet's time in {:.0} s",
            kind.letter(),
            kind.name(options),
            options.seconds,
            options.seconds / options.scale
        ));
        match column::run(options, kind, &logs) {
            Ok(column) => {
                progress(&format!(
                    "({}) completed {}, engine timeouts {}, wrong R3 bytes {}, {:.2} rollouts/s",
                    kind.letter(),
                    column.completed,
                    column.engine_timeouts,
                    column.wrong_bytes,
                    column.rollouts_per_second
                ));
                columns.push(column);
            }
            // A peer that does not start must not take the demo with it.
            Err(error) if kind == ColumnKind::Peer => {
                left_out.push(format!("({}) {}: {error}", kind.letter(), options.peer_name));
            }
            Err(error) => return Err(error),
        }
    }
    let criteria = criteria(&columns);
    let report =
        DemoReport { options: options.clone(), machine: process::machine(), date, columns, criteria, left_out };
    std::fs::write(&options.out, serde_json::to_vec_pretty(&report)?)?;
    Ok(report)
}

fn criteria(columns: &[Column]) -> Vec<Criterion> {
    let find = |kind: ColumnKind| columns.iter().find(|c| c.kind == kind);
    let mut out = Vec::new();
    if let Some(a) = find(ColumnKind::Unbounded) {
        out.push(Criterion {
            what: "(a) an unbounded router lets the engines time out".to_owned(),
            measured: format!("{} engine timeouts", a.engine_timeouts),
            holds: a.engine_timeouts > 0,
        });
    }
    for kind in [ColumnKind::Inline, ColumnKind::Reference] {
        if let Some(c) = find(kind) {
            let bad = c.wrong_bytes + c.missing_r3 + c.failures.values().sum::<u64>();
            out.push(Criterion {
                what: format!("({}) no engine timeouts, no wrong R3 bytes, no failures", kind.letter()),
                measured: format!(
                    "{} timeouts, {} wrong bytes, {} replies without R3, {} failures, {} replies right",
                    c.engine_timeouts,
                    c.wrong_bytes,
                    c.missing_r3,
                    c.failures.values().sum::<u64>(),
                    c.right_replies
                ),
                holds: c.engine_timeouts == 0 && bad == 0 && c.right_replies > 0 && c.right_replies == c.completed,
            });
        }
    }
    if let (Some(a), Some(c)) = (find(ColumnKind::Unbounded), find(ColumnKind::Reference)) {
        let times = c.rollouts_per_second / a.rollouts_per_second;
        out.push(Criterion {
            what: "(c) at least 4 times the rollouts/s of (a)".to_owned(),
            measured: format!("{times:.1} times"),
            holds: c.rollouts_per_second >= 4.0 * a.rollouts_per_second,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(kind: ColumnKind) -> Column {
        Column { kind, completed: 10, right_replies: 10, rollouts_per_second: 1.0, ..Column::empty(kind) }
    }

    #[test]
    fn criteria_say_what_was_measured_and_fail_when_it_is_not_enough() {
        let mut a = column(ColumnKind::Unbounded);
        let (b, mut c) = (column(ColumnKind::Inline), column(ColumnKind::Reference));
        a.engine_timeouts = 3;
        c.rollouts_per_second = 4.0;
        assert!(criteria(&[a.clone(), b.clone(), c.clone()]).iter().all(|c| c.holds));
        c.rollouts_per_second = 3.9;
        let held: Vec<bool> = criteria(&[a.clone(), b.clone(), c.clone()]).iter().map(|c| c.holds).collect();
        assert_eq!(held, [true, true, true, false]);
        c.wrong_bytes = 1;
        a.engine_timeouts = 0;
        let held: Vec<bool> = criteria(&[a, b, c]).iter().map(|c| c.holds).collect();
        assert_eq!(held, [false, true, false, false]);
        let mut failing = column(ColumnKind::Inline);
        failing.failures.insert("500: x".to_owned(), 1);
        assert!(!criteria(&[failing])[0].holds);
        let empty = Column::empty(ColumnKind::Inline);
        assert!(!criteria(&[empty])[0].holds, "nothing completed is no success");
    }

    #[test]
    fn numbers_outside_of_their_bounds_and_unknown_columns_are_refused() {
        let refused = |options: DemoOptions| options.check().unwrap_err();
        for scale in [0.0, -1.0, f64::NAN, 2000.0] {
            assert!(refused(DemoOptions { scale, ..Default::default() }).starts_with("--scale "));
        }
        assert!(refused(DemoOptions { seconds: f64::NAN, ..Default::default() }).starts_with("--seconds not a number"));
        assert!(refused(DemoOptions { per_gpu: 0, ..Default::default() }).starts_with("--per-gpu 0 "));
        let columns = vec!["a".to_owned(), "z".to_owned()];
        assert_eq!(refused(DemoOptions { columns, ..Default::default() }), "--column z is none of a, a2, b, c");
        DemoOptions::default().check().unwrap();
    }

    #[test]
    fn a_demo_without_a_router_is_refused() {
        let error = run(&DemoOptions::default(), |_| {}).unwrap_err();
        assert!(error.to_string().contains("router is empty"));
    }
}
