//! An HTTP server that draws pictures. It speaks OpenAI's API for images, A1111's (`/sdapi/v1`), what Easy Diffusion expects of an engine,
//! and an API of its own with progress as it happens, for which it brings a page.
//!
//! Requests become tasks in the queue of a device, and a thread for each device draws them one after the other. Networks stay loaded
//! from one job to the next, so that another checkpoint or LoRA is a refit.

mod api;
mod app;
mod draw;
mod fault;
mod guard;
mod job;
mod library;
mod metrics;
mod order;
mod pictures;
mod queue;
mod sync;
mod task;

pub use draw::{Lane, Options, lane};
pub use library::Folders;

use app::App;
use draw::Studio;
use library::Library;
use queue::Queue;
use sdrun::{Registry, abi};
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// What a server needs.
pub struct Config {
    /// Where to listen. Port 0 takes any free port.
    pub listen: SocketAddr,
    /// What clients must show as a bearer token, as the password of Basic authentication, or as `USER:PASSWORD` there. Other machines
    /// need one.
    pub key: Option<String>,
    /// Web pages that may use the server from a browser, such as `https://lite.koboldai.net`, besides its own.
    pub origins: Vec<String>,
    /// Where models and other files are.
    pub folders: Folders,
    /// The model that requests without a name get, by its name in the folder.
    pub model: Option<String>,
    /// The providers of this machine.
    pub registry: Registry,
    /// A queue for each.
    pub lanes: Vec<Lane>,
    /// How to build engines for a device.
    pub options: Arc<Options>,
    /// The server stops when this is set.
    pub stop: Arc<AtomicBool>,
    /// The server stops when this process is gone.
    pub parent: Option<u32>,
}

/// How long open connections may last after a shutdown begins.
const LAST_REPLIES: Duration = Duration::from_secs(5);
/// How often to look whether the server shall stop.
const PATIENCE: Duration = Duration::from_millis(100);
/// How many such looks pass between two looks at the parent process.
const LOOKS: u32 = 10;

/// Runs the server until `stop` is set or the parent exits. Calls `ready` with the address once clients can connect.
///
/// # Errors
/// An address that is in use or needs a key, a model that does not exist, and folders that cannot be read.
pub fn serve(config: Config, ready: &mut dyn FnMut(SocketAddr)) -> sdrun::Result<()> {
    let Config { listen, key, origins, folders, model, registry, lanes, options, stop, parent } = config;
    if !listen.ip().is_loopback() && key.is_none() {
        let message = format!("other machines can reach {listen}, and there is no key to keep strangers out");
        return Err(abi::Error::invalid(message).with_hint("set a key, or listen on 127.0.0.1").into());
    }
    let registry = Arc::new(registry);
    let library = Arc::new(Library::open(folders, registry.paths().clone())?);
    let app = Arc::new(App::new(library.clone(), lanes.len(), key, origins));
    if let Some(model) = &model {
        let found = library.model(model).map_err(|fault| abi::Error::not_found(fault.message))?;
        app.options().set_model(&found.title);
    }
    let failed = |error: std::io::Error| {
        let code = match error.kind() {
            std::io::ErrorKind::AddrInUse => abi::ErrorCode::AlreadyExists,
            std::io::ErrorKind::PermissionDenied => abi::ErrorCode::PermissionDenied,
            _ => abi::ErrorCode::InvalidArgument,
        };
        abi::Error::new(code, format!("cannot listen on {listen}: {error}"))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| abi::Error::internal(format!("cannot start threads: {error}")))?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind(listen)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    thread::scope(|scope| {
        for (lane, queue) in lanes.into_iter().zip(app.queues()) {
            let studio = Studio {
                registry: registry.clone(),
                library: library.clone(),
                metrics: app.metrics().clone(),
                options: options.clone(),
                lane,
            };
            scope.spawn(move || studio.work(queue));
        }
        ready(address);
        let served = runtime.block_on(async {
            let (stopping, mut stopped) = tokio::sync::watch::channel(false);
            let shutdown = {
                let app = app.clone();
                async move {
                    told_to_stop(&stop, parent).await;
                    app.queues().iter().for_each(Queue::close);
                    let _ = stopping.send(true);
                }
            };
            let server = axum::serve(listener, api::router(app.clone())).with_graceful_shutdown(shutdown);
            let patience = async {
                let _ = stopped.wait_for(|stopped| *stopped).await;
                tokio::time::sleep(LAST_REPLIES).await;
            };
            // Streams of events and idle connections have no end of their own.
            tokio::select! {
                served = server => served,
                () = patience => Ok(()),
            }
        });
        app.queues().iter().for_each(Queue::close);
        served.map_err(|error| failed(error).into())
    })
}

/// Waits until the server shall stop.
async fn told_to_stop(stop: &AtomicBool, parent: Option<u32>) {
    let mut looks = 0;
    while !stop.load(Relaxed) {
        if looks % LOOKS == 0 && parent.is_some_and(|pid| !metrics::exists(pid)) {
            tracing::warn!("the process that started this server is gone");
            return;
        }
        looks += 1;
        tokio::time::sleep(PATIENCE).await;
    }
}

/// The OpenAPI document of the server.
pub fn openapi() -> String {
    api::document().to_pretty_json().unwrap_or_default() + "\n"
}
