//! What the checks found.

use sdrun::{
    abi::{Capabilities, Device, MemoryReport, Precision},
    bench::Environment,
    verify::Comparison,
};
use serde::{Deserialize, Serialize};

/// Version of the JSON document. It grows when a field is removed or changes its meaning.
pub const SCHEMA_VERSION: u32 = 1;

/// The result of a self-test.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema: u32,
    /// Version of sdrun.
    pub sdrun: String,
    /// The machine.
    pub environment: Environment,
    /// How long everything took.
    pub seconds: f64,
    /// The devices that were checked.
    pub subjects: Vec<Subject>,
    /// The providers that could not be checked here.
    pub absent: Vec<Absent>,
}

impl Report {
    /// Whether no check failed.
    pub fn passed(&self) -> bool {
        self.subjects.iter().flat_map(Subject::states).all(|state| state != State::Failed)
    }

    /// How many checks ended in a state.
    pub fn count(&self, state: State) -> usize {
        self.subjects.iter().flat_map(Subject::states).filter(|found| *found == state).count()
    }
}

/// A provider that could not be checked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Absent {
    /// Its id.
    pub provider: String,
    /// Why.
    pub reason: String,
}

/// A device as a provider uses it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Subject {
    /// The provider's id.
    pub provider: String,
    /// Which build of the provider it is.
    pub build_id: String,
    /// Name and version of its runtime.
    pub runtime: (String, String),
    /// The device.
    pub device: Device,
    /// What the provider offers on it.
    pub capabilities: Capabilities,
    /// The checks of what a provider does.
    pub checks: Vec<Check>,
    /// The checks of what it computes.
    pub networks: Vec<Network>,
    /// Pictures that were drawn.
    pub pictures: Vec<Sample>,
    /// What the provider and its runtime wrote, oldest first.
    pub log: Vec<String>,
}

impl Subject {
    /// The states of all checks.
    pub fn states(&self) -> impl Iterator<Item = State> {
        self.checks.iter().map(|check| check.state).chain(self.networks.iter().map(|network| network.state))
    }
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As it should be.
    Passed,
    /// Wrong, or an error.
    Failed,
    /// The provider does not offer what the check needs.
    NotOffered,
    /// There was not enough time or memory.
    NotRun,
}

/// A check of what a provider does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// How it ended.
    pub state: State,
    /// What was found, or why it was not run.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
}

/// A check of a built-in network at one size in one precision, against outputs of the reference provider in fp32.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// The built-in model.
    pub model: String,
    /// The shape of its first input.
    pub shape: Vec<usize>,
    /// The precision of the engine.
    pub precision: Precision,
    /// How it ended.
    pub state: State,
    /// What is wrong, or why it was not run.
    pub reason: Option<String>,
    /// Time to build the engine.
    pub build_seconds: Option<f64>,
    /// Time to give it its weights, which are generated meanwhile.
    pub load_seconds: Option<f64>,
    /// Time of the first run, in milliseconds.
    pub first_run_ms: Option<f64>,
    /// Median of three further runs, in milliseconds.
    pub run_ms: Option<f64>,
    /// The worst output.
    pub worst: Option<Comparison>,
    /// Peak memory of the provider's process since the build began. `None` where the system does not tell.
    pub peak_bytes: Option<u64>,
    /// What the provider says that the session needs.
    pub memory: Option<MemoryReport>,
}

/// A picture of the demo model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// What was asked for.
    pub prompt: String,
    /// The precision of all networks.
    pub precision: Precision,
    /// Whether the picture shows it.
    pub right: bool,
    /// The picture: a PNG file, in base64.
    pub png: String,
}
