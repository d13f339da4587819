//! The steps, one after the other: each on a thread of its own with a time limit, so that a failed or hung step stops
//! no other.

use crate::nvml::Gpu;
use anyhow::{Context as _, ensure};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Files of the output folder.
const FIGURES: &str = "gpu.json";
const LOG: &str = "berth.log";
/// Stack of a step: NVML's table of symbols is large.
const STACK_BYTES: usize = 8 * 1024 * 1024;

/// What is checked, and with what.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) berth: PathBuf,
    /// The NVML library; `None`: the daemon searches for it.
    pub(crate) nvml: Option<PathBuf>,
    /// `libcuda.so.1`; `None`: by the loader, or beside NVML.
    pub(crate) cuda: Option<PathBuf>,
    /// The state file of the fake NVML, which then simulates processes and errors.
    pub(crate) fake_state: Option<PathBuf>,
    pub(crate) out: PathBuf,
    pub(crate) load_seconds: u64,
}

/// What the steps share. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Check {
    pub(crate) options: Arc<Options>,
    /// Results of the present step.
    pub(crate) record: Record,
    /// The NVML library that `berth node check` finds.
    pub(crate) library: Arc<OnceLock<PathBuf>>,
    /// The GPUs with their settings as step 0 found them.
    before: Arc<Mutex<Option<Vec<Gpu>>>>,
}

/// Why a step cannot be done here.
#[derive(Debug)]
pub(crate) struct Skip(String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// The error that skips the step.
pub(crate) fn skip(why: impl Into<String>) -> anyhow::Error {
    Skip(why.into()).into()
}

/// What a step has found so far; shared with the thread that waits for it.
#[derive(Clone, Default)]
pub(crate) struct Record(Arc<Mutex<Found>>);

#[derive(Default)]
struct Found {
    figures: Map<String, Value>,
    notes: Vec<String>,
    at: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Record {
    /// Records a measurement, for the step's line and gpu.json.
    pub(crate) fn figure(&self, name: &str, value: impl Into<Value>) {
        lock(&self.0).figures.insert(name.to_owned(), value.into());
    }

    /// Records a duration in milliseconds, with one decimal.
    pub(crate) fn ms(&self, name: &str, duration: Duration) {
        self.figure(name, round(duration.as_secs_f64() * 1000.0));
    }

    /// Records what was not checked, or not as on other machines.
    pub(crate) fn note(&self, text: impl Into<String>) {
        lock(&self.0).notes.push(text.into());
    }

    /// Sets what the step does now, which is the cause if the step exceeds its time limit.
    pub(crate) fn at(&self, text: &str) {
        text.clone_into(&mut lock(&self.0).at);
    }
}

/// Rounds to one decimal.
pub(crate) fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

impl Check {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options: Arc::new(options),
            record: Record::default(),
            library: Arc::default(),
            before: Arc::default(),
        }
    }

    /// A command of `berth` with the flags of the daemon that every step has.
    pub(crate) fn berth(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.options.berth);
        command.args(subcommand.split(' ')).args(["--api-server", "off", "--node-name", "gpu-check"]);
        if let Some(library) = &self.options.nvml {
            command.arg("--nvml-library").arg(library);
        }
        command.env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    /// Whether this `berth` has a command.
    pub(crate) fn has_command(&self, name: &str) -> bool {
        let mut command = Command::new(&self.options.berth);
        command.args([name, "--help"]).stdin(Stdio::null());
        command.output().is_ok_and(|output| output.status.success())
    }

    /// Whether the fake NVML simulates processes and errors.
    pub(crate) fn is_fake(&self) -> bool {
        self.options.fake_state.is_some()
    }

    pub(crate) fn set_before(&self, gpus: Vec<Gpu>) {
        *lock(&self.before) = Some(gpus);
    }

    pub(crate) fn before(&self) -> Option<Vec<Gpu>> {
        lock(&self.before).clone()
    }

    /// Writes a file of the output folder.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let path = self.options.out.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())
    }

    /// Appends a daemon's log to the file of all logs.
    pub(crate) fn add_log(&self, text: &str) {
        let file = OpenOptions::new().create(true).append(true).open(self.options.out.join(LOG));
        // Without the log the verdicts are the same.
        let _ = file.and_then(|mut file| writeln!(file, "== a daemon\n{text}"));
    }
}

/// One step of the check.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) limit: Duration,
    pub(crate) run: fn(&Check) -> anyhow::Result<()>,
}

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

/// The result of a step.
#[derive(Serialize)]
struct Outcome {
    step: usize,
    name: &'static str,
    seconds: f64,
    verdict: Verdict,
    notes: Vec<String>,
    figures: Map<String, Value>,
}

impl Outcome {
    /// One line: name, verdict, figures, and the cause of a failure. Figures that are lists are in the file alone.
    fn line(&self) -> String {
        let (word, cause) = match &self.verdict {
            Verdict::Passed => ("passed", None),
            Verdict::Failed(cause) => ("FAILED", Some(cause)),
            Verdict::Skipped(why) => ("skipped", Some(why)),
        };
        let shown = self.figures.iter().filter(|(_, value)| !value.is_array() && !value.is_object());
        let figures: Vec<String> = shown.map(|(name, value)| format!("{name}={value}")).collect();
        let mut parts = vec![figures.join(" ")];
        parts.extend(cause.map(|cause| cause.replace('\n', " ")));
        parts.extend(self.notes.iter().map(|note| format!("not checked: {note}")));
        parts.retain(|part| !part.is_empty());
        format!("{:2} {:<10} {word:<7} {:6.1} s  {}", self.step, self.name, self.seconds, parts.join("; "))
            .trim_end()
            .to_owned()
    }
}

/// Runs one step; a step that exceeds its limit is no longer waited for.
fn run_step(check: &Check, number: usize, step: &Step) -> Outcome {
    let record = Record::default();
    let check = Check { record: record.clone(), ..check.clone() };
    let (sender, receiver) = channel();
    let run = step.run;
    let began = Instant::now();
    let started = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
        let _ = sender.send(run(&check));
    });
    let result = match started {
        Ok(_) => receiver.recv_timeout(step.limit),
        Err(error) => Ok(Err(error.into())),
    };
    let found = lock(&record.0);
    let verdict = match result {
        Ok(Ok(())) => Verdict::Passed,
        Ok(Err(error)) => match error.downcast_ref::<Skip>() {
            Some(Skip(why)) => Verdict::Skipped(why.clone()),
            None => Verdict::Failed(format!("{error:#}")),
        },
        Err(RecvTimeoutError::Timeout) => {
            Verdict::Failed(format!("not over after {} s: {}", step.limit.as_secs(), found.at))
        }
        Err(RecvTimeoutError::Disconnected) => Verdict::Failed(format!("panicked: {}", found.at)),
    };
    Outcome {
        step: number,
        name: step.name,
        seconds: round(began.elapsed().as_secs_f64()),
        verdict,
        notes: found.notes.clone(),
        figures: found.figures.clone(),
    }
}

/// Runs all steps, prints a line for each and the last line, writes the figures, and returns whether none failed.
/// `absent`: why there is nothing to check.
///
/// # Errors
/// If the output folder or the figures cannot be written.
pub(crate) fn run(check: &Check, steps: &[Step], absent: Option<&str>) -> anyhow::Result<bool> {
    let out = &check.options.out;
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let mut outcomes = Vec::new();
    if let Some(why) = absent {
        println!("skipped: {why}");
    } else {
        ensure!(
            check.options.berth.is_file(),
            "{} does not exist: build it (cargo build --release -p berth) or name it with --berth",
            check.options.berth.display()
        );
        let _ = fs::remove_file(out.join(LOG));
        for (number, step) in steps.iter().enumerate() {
            let outcome = run_step(check, number, step);
            println!("{}", outcome.line());
            outcomes.push(outcome);
            // After each step, so that results are kept if the machine is lost during a later one.
            write_figures(check, &outcomes)?;
        }
    }
    let count = |is: fn(&Verdict) -> bool| outcomes.iter().filter(|outcome| is(&outcome.verdict)).count();
    let passed = count(|verdict| *verdict == Verdict::Passed);
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_)));
    let skipped = steps.len() - passed - failed;
    println!("gpu: {passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

fn write_figures(check: &Check, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let played_by_fake = check.is_fake();
    let json = json!({ "playedByFake": played_by_fake, "steps": outcomes });
    check.write(FIGURES, &serde_json::to_vec_pretty(&json)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(out: &std::path::Path) -> Check {
        Check::new(Options {
            berth: std::env::current_exe().unwrap(),
            nvml: None,
            cuda: None,
            fake_state: None,
            out: out.to_owned(),
            load_seconds: 1,
        })
    }

    fn step(limit_ms: u64, run: fn(&Check) -> anyhow::Result<()>) -> Step {
        Step { name: "test", limit: Duration::from_millis(limit_ms), run }
    }

    const STEPS: [fn(&Check) -> anyhow::Result<()>; 5] = [
        |check| {
            check.record.figure("scan_ms", 1.5);
            check.record.figure("calls", json!([1]));
            Ok(())
        },
        |_| anyhow::bail!("no such\nGPU"),
        |_| Err(skip("no root")),
        |check| {
            check.record.at("the call that hangs");
            std::thread::sleep(Duration::from_secs(60));
            Ok(())
        },
        |_| panic!("a defect"),
    ];

    #[test]
    fn a_failed_a_hung_and_a_panicked_step_stop_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let check = check(folder.path());
        // Only the one that hangs is to meet its limit.
        let limit_ms = |n| if n == 3 { 300 } else { 60_000 };
        let steps: [_; STEPS.len()] = std::array::from_fn(|n| step(limit_ms(n), STEPS[n]));
        assert!(!super::run(&check, &steps, None).unwrap());
        let json: Value = serde_json::from_slice(&fs::read(folder.path().join(FIGURES)).unwrap()).unwrap();
        let verdicts: Vec<&Value> =
            json["steps"].as_array().unwrap().iter().map(|step| &step["verdict"]).collect();
        assert_eq!(verdicts[0], "passed");
        assert_eq!(verdicts[1]["failed"], "no such\nGPU");
        assert_eq!(verdicts[2]["skipped"], "no root");
        assert_eq!(verdicts[3]["failed"], "not over after 0 s: the call that hangs");
        assert!(verdicts[4]["failed"].as_str().unwrap().starts_with("panicked"));
        assert_eq!(json["steps"][0]["figures"]["calls"], json!([1]));
    }

    #[test]
    fn the_line_of_a_step_has_figures_and_the_cause() {
        let folder = tempfile::tempdir().unwrap();
        let check = check(folder.path());
        let line = |at: usize| run_step(&check, at, &step(5000, STEPS[at])).line();
        assert!(line(0).ends_with("scan_ms=1.5") && line(0).contains("passed"), "{}", line(0));
        assert!(line(1).ends_with("no such GPU") && line(1).contains("FAILED"), "{}", line(1));
        assert!(line(2).contains("skipped") && line(2).ends_with("no root"), "{}", line(2));
    }

    #[test]
    fn without_a_gpu_every_step_is_skipped_and_nothing_fails() {
        let folder = tempfile::tempdir().unwrap();
        let steps = STEPS.map(|run| step(300, run));
        assert!(super::run(&check(folder.path()), &steps, Some("there is no NVIDIA GPU")).unwrap());
        assert!(!folder.path().join(FIGURES).exists());
    }
}
