//! Router processes: started, waited for, measured, stopped.
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::emulator::quantile;

/// Longest time that a router may take to be ready.
const START: Duration = Duration::from_secs(90);
/// How long a router may take to end after SIGTERM.
const STOP: Duration = Duration::from_secs(5);
/// How long the thread that measures lateness sleeps.
const PROBE: Duration = Duration::from_millis(20);
/// Clock ticks per second of `/proc/PID/stat` (`USER_HZ`, fixed on Linux).
const TICKS: f64 = 100.0;

/// A router that runs.
pub(super) struct Router {
    child: Child,
    pub(super) url: String,
}

/// A port that is free now.
pub(super) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

impl Router {
    /// Starts `command arguments`, with its output in `log`, and waits until `/readiness` answers 200.
    pub(super) fn start(command: &[String], arguments: &[String], port: u16, log: &Path) -> io::Result<Self> {
        let output = File::create(log)?;
        let (program, first) = command
            .split_first()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the router's command is empty"))?;
        let mut child = Command::new(program);
        child.args(first).args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        for name in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            child.env_remove(name);
        }
        // The peer looks for a tokenizer on the network otherwise.
        child.env("HF_HUB_OFFLINE", "1");
        let child = child.spawn().map_err(|e| io::Error::new(e.kind(), format!("{program}: {e}")))?;
        let mut router = Self { child, url: format!("http://127.0.0.1:{port}") };
        router.wait_ready(port, log)?;
        Ok(router)
    }

    fn wait_ready(&mut self, port: u16, log: &Path) -> io::Result<()> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!(
                    "the router ended with {status}; its output is in {}",
                    log.display()
                )));
            }
            if ready(port) {
                return Ok(());
            }
            if began.elapsed() > START {
                let message = format!("/readiness was not 200 within {START:?}; its output is in {}", log.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// CPU seconds that the process and its threads have used.
    pub(super) fn cpu_seconds(&self) -> f64 {
        cpu_seconds(&self.child.id().to_string())
    }

    /// Most memory that the process ever had, bytes.
    pub(super) fn peak_memory(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("");
        line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
    }
}

/// CPU seconds of a process (`self` for this one).
pub(super) fn cpu_seconds(pid: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold blanks; what follows its closing bracket does not.
    let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = after.split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / TICKS
}

fn ready(port: u16) -> bool {
    use std::io::{Read, Write};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return false };
    let limit = Some(Duration::from_secs(2));
    if stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)).is_err() {
        return false;
    }
    let mut head = [0; 12];
    stream.write_all(b"GET /readiness HTTP/1.1\r\nhost: demo\r\nconnection: close\r\n\r\n").is_ok()
        && stream.read_exact(&mut head).is_ok()
        && &head[9..12] == b"200"
}

impl Drop for Router {
    fn drop(&mut self) {
        // SIGTERM by the system's own command: std knows only SIGKILL, and a router is to be seen to end well.
        let _ended_anyway = Command::new("kill").arg(self.child.id().to_string()).status();
        let began = Instant::now();
        while began.elapsed() < STOP {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Measures how late a thread that sleeps for a moment wakes up.
pub(super) struct Lateness {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<f32>>,
}

impl Lateness {
    /// Sleeps from now on.
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut late = Vec::new();
            while !told.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(PROBE);
                late.push(began.elapsed().saturating_sub(PROBE).as_secs_f32());
            }
            late
        });
        Self { stop, thread }
    }

    /// The 99th percentile, seconds.
    pub(super) fn stop(self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut late = self.thread.join().unwrap_or_default();
        quantile(&mut late, 0.99)
    }
}

/// Processor, cores and system of this machine.
pub(super) fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu
        .lines()
        .find_map(|l| l.strip_prefix("model name").and_then(|r| r.split_once(':')))
        .map_or("unknown processor", |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{name}, {cores} cores, Linux {}", release.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_some_cpu_and_the_machine_has_a_name() {
        let began = Instant::now();
        while cpu_seconds("self") < 0.02 && began.elapsed() < Duration::from_secs(20) {
            std::hint::black_box((0..100_000).sum::<u64>());
        }
        assert!(cpu_seconds("self") >= 0.02);
        assert!(machine().contains("cores"));
    }

    #[test]
    fn a_router_that_ends_at_once_is_an_error_that_names_its_log() {
        let log = std::env::temp_dir().join(format!("r3router-demo-test-{}", std::process::id()));
        let error = Router::start(&["false".to_owned()], &[], free_port().unwrap(), &log).err().expect("it ended");
        assert!(error.to_string().contains("its output is in"), "{error}");
        std::fs::remove_file(log).unwrap();
    }
}
