//! The table as plain text.
use std::fmt::Write as _;

use super::{Column, DemoReport};

type Cell = fn(&Column) -> String;

/// Lateness of timers from which on a column does not show what the fleet would do, seconds of the fleet: a decode rank's step is 15 to
/// 50 ms, a prefill batch 1.2 s.
const TOO_LATE: f64 = 0.5;

fn seconds(pair: [f64; 2]) -> String {
    format!("{:.1} / {:.1} s", pair[0], pair[1])
}

const ROWS: &[(&str, Cell)] = &[
    ("rollouts completed", |c| c.completed.to_string()),
    ("engine timeouts", |c| c.engine_timeouts.to_string()),
    ("other failures", |c| c.failures.values().sum::<u64>().to_string()),
    ("wrong R3 bytes", |c| c.wrong_bytes.to_string()),
    ("replies without R3", |c| c.missing_r3.to_string()),
    ("rollouts/s", |c| format!("{:.2}", c.rollouts_per_second)),
    ("peak transfers per decode rank", |c| c.peak_transfer.to_string()),
    ("mean transfers per decode rank", |c| format!("{:.1}", c.mean_transfer)),
    ("mean running per decode rank", |c| format!("{:.1}", c.mean_running)),
    ("wait in router, p50 / p99", |c| seconds(c.router_wait)),
    ("wait in engine, p50 / p99", |c| seconds(c.engine_wait)),
    ("whole rollout, p50 / p99", |c| seconds(c.latency)),
    ("router CPU per rollout (real)", |c| format!("{:.1} ms", c.router_cpu_per_rollout * 1e3)),
    ("timers late, p99", |c| format!("{:.2} s", c.late_p99)),
    ("cores: router, fleet + client (real)", |c| format!("{:.2}, {:.2}", c.router_cores, c.harness_cores)),
];

pub(super) fn render(report: &DemoReport) -> String {
    let o = &report.options;
    let mut out = String::new();
    let _infallible = writeln!(
        out,
        "{} prefill + {} decode ranks, {} requests outstanding per GPU, {} shared ({} prefixes, {}) + {} to {} new prompt tokens, \
         {} output tokens (median), R3 on, SGLang {}\n\
         scale 1:{}: everything on the wire is {} times smaller and {} times faster than in the table; {:.0} s of the fleet's time per column\n\
         {}, {}\n",
        o.prefill,
        o.decode,
        o.per_gpu,
        o.cached_tokens,
        o.families,
        if o.warm { "cached from the start" } else { "cached after their first use" },
        o.new_tokens[0],
        o.new_tokens[1],
        o.output_tokens,
        o.engine_version,
        o.scale,
        o.scale,
        o.scale,
        o.seconds,
        report.machine,
        report.date
    );
    let mut lines: Vec<Vec<String>> = vec![
        std::iter::once(String::new())
            .chain(report.columns.iter().map(|c| format!("({}) {}", c.kind.letter(), c.name)))
            .collect(),
    ];
    for (name, cell) in ROWS {
        lines.push(std::iter::once((*name).to_owned()).chain(report.columns.iter().map(cell)).collect());
    }
    let width = |i: usize| lines.iter().map(|l| l[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=report.columns.len()).map(width).collect();
    for (n, line) in lines.iter().enumerate() {
        for (i, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _infallible = if i == 0 { write!(out, "{cell:<width$}") } else { write!(out, "  {cell:>width$}") };
        }
        out.push('\n');
        if n == 0 {
            let _infallible = writeln!(out, "{}", "-".repeat(widths.iter().sum::<usize>() + 2 * report.columns.len()));
        }
    }
    out.push('\n');
    for criterion in &report.criteria {
        let mark = if criterion.holds { "holds" } else { "DOES NOT HOLD" };
        let _infallible = writeln!(out, "{mark}: {} ({})", criterion.what, criterion.measured);
    }
    for column in report.columns.iter().filter(|c| c.late_p99 > TOO_LATE) {
        let _infallible = writeln!(
            out,
            "({}) this machine was too busy for this scale: timers rang {:.1} s late. Give it more CPU, or a smaller --scale.",
            column.kind.letter(),
            column.late_p99
        );
    }
    for left in &report.left_out {
        let _infallible = writeln!(out, "left out: {left}");
    }
    for column in &report.columns {
        for (reason, count) in column.failures.iter().take(5) {
            let _infallible = writeln!(out, "({}) {count} x {reason}", column.kind.letter());
        }
    }
    out
}
