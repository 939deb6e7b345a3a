//! Bad days: how each fault begins, ends, and lies.
use r3router_core::load::RankReport;
use r3router_core::time::Moment;

use crate::drive::{Event, Run, note};
use crate::plan::{Fault, Ns, gaps};
use crate::router::Router;

impl Fault {
    /// From its begin to its end.
    pub(crate) fn lasts(&self) -> Ns {
        match self {
            Self::Dies { heard, back, .. } => heard + back,
            Self::RankHangs { lasts, .. }
            | Self::Silent { lasts, .. }
            | Self::Late { lasts, .. }
            | Self::Lies { lasts, .. }
            | Self::Foreign { lasts, .. }
            | Self::Retracts { lasts, .. }
            | Self::Drains { lasts, .. }
            | Self::Pauses { lasts } => *lasts,
            Self::Retold { .. } => 0,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Dies { .. } => "fault: dies",
            Self::RankHangs { .. } => "fault: rank hangs",
            Self::Silent { .. } => "fault: silent",
            Self::Late { .. } => "fault: late",
            Self::Lies { .. } => "fault: lies",
            Self::Foreign { .. } => "fault: foreign",
            Self::Retracts { .. } => "fault: retracts",
            Self::Drains { .. } => "fault: drains",
            Self::Pauses { .. } => "fault: pauses",
            Self::Retold { .. } => "fault: retold",
        }
    }
}

impl<R: Router> Run<'_, R> {
    pub(crate) fn fault(&mut self, index: usize) {
        let fault = self.plan.faults[index].1.clone();
        note!(self, "fault {fault:?}");
        self.tally.count(fault.name());
        if let Fault::Dies { engine, heard, back } = fault {
            if let Some(worker) = self.current[engine].filter(|w| self.engines.alive(*w)) {
                self.engines.kill(worker, self.now);
                self.book.workers[worker].tainted = true;
                self.later(heard, Event::Heard(engine));
                self.later(heard + back, Event::Back(engine));
            }
            return;
        }
        self.turn(&fault, true);
        self.later(fault.lasts(), Event::FaultEnds(index));
    }

    pub(crate) fn fault_ends(&mut self, index: usize) {
        if !self.healed {
            let fault = self.plan.faults[index].1.clone();
            note!(self, "over: {fault:?}");
            self.turn(&fault, false);
        }
    }

    fn turn(&mut self, fault: &Fault, on: bool) {
        match *fault {
            Fault::Silent { engine, .. } => self.conditions[engine].silent = on,
            Fault::Late { engine, by, .. } => self.conditions[engine].late = if on { by } else { 0 },
            Fault::Lies { engine, .. } => self.conditions[engine].lies = on,
            Fault::Pauses { .. } => self.pause(on),
            Fault::RankHangs { engine, rank, .. } => {
                if let Some(worker) = self.current[engine] {
                    self.engines.hang((worker, usize::from(rank)), on);
                }
            }
            Fault::Foreign { engine, rank, rows, tokens, .. } => {
                if let Some(worker) = self.current[engine] {
                    let (rows, tokens) = if on { (rows, tokens) } else { (0, 0) };
                    self.engines.foreign((worker, usize::from(rank)), rows, tokens);
                }
            }
            Fault::Retracts { engine, rank, .. } => {
                if let Some(worker) = self.current[engine] {
                    self.engines.force_retraction((worker, usize::from(rank)), on);
                }
            }
            Fault::Drains { engine, .. } => {
                if let Some(worker) = self.current[engine] {
                    self.drain(worker, on);
                }
            }
            Fault::Retold { engine } => {
                if let Some(worker) = self.current[engine].filter(|_| on) {
                    let mut facts = gaps(&mut self.rng, crate::plan::facts(&self.plan.engines[engine].truth));
                    facts.reports_load = self.plan.engines[engine].told.reports_load;
                    self.tell(worker, facts);
                }
            }
            Fault::Dies { .. } => {}
        }
    }

    /// Makes nonsense of a report: fields missing, zero, huge, or another rank's; times of the past and of the future.
    pub(crate) fn lie(&mut self, report: &mut RankReport) {
        let rng = &mut self.rng;
        let mut small = |field: &mut Option<u32>| match rng.range(0, 5) {
            0 => *field = None,
            1 => *field = Some(0),
            2 => *field = Some(u32::MAX),
            3 => *field = Some(rng.range(0, 200) as u32),
            _ => {}
        };
        small(&mut report.running);
        small(&mut report.waiting_total);
        small(&mut report.prealloc);
        small(&mut report.transfer);
        small(&mut report.retracted);
        small(&mut report.max_running);
        small(&mut report.mamba_free);
        let mut large = |field: &mut Option<u64>| match rng.range(0, 5) {
            0 => *field = None,
            1 => *field = Some(0),
            2 => *field = Some(u64::MAX),
            3 => *field = Some(rng.range(0, 500_000)),
            _ => {}
        };
        large(&mut report.used_tokens);
        large(&mut report.max_total_tokens);
        large(&mut report.waiting_uncached_tokens);
        match rng.range(0, 9) {
            0 => report.rank = rng.range(0, 100) as u16,
            1 => report.measured_at = Moment::ZERO,
            2 => report.measured_at = Moment(self.now + rng.range(1, 100) * 1_000_000_000),
            3 => report.measured_at = Moment::NEVER,
            _ => {}
        }
    }
}
