//! `sdrun serve`

use crate::{build::BuildArgs, complete, context::Context, parse::duration, provider::isolation};
use sdrun::{
    Registry, Wishes,
    abi::{Device, DeviceKind, Error},
};
use sdrun_server::{Config, Folders, Lane, lane, serve};
use std::{
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

/// How long a call may go on after its job was cancelled. Then its worker is killed, and the networks in it have to be loaded again.
const CANCEL_LIMIT: Duration = Duration::from_secs(5);
/// Where the server listens unless the user says otherwise: A1111's port, which clients try first.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7860);

/// Draw pictures for other programs over HTTP, and on a page
///
/// Speaks A1111's API (/sdapi/v1), OpenAI's (/v1/images), what Easy Diffusion expects of its engine, and an API of its own, which
/// /openapi.json describes. Networks stay loaded from one picture to the next, and another checkpoint or LoRA is a refit. Without
/// --models there is only the demo model.
///
/// Only programs on this machine can connect, and no web pages but the server's own. For other machines, give --listen and a key.
///
/// Example: sdrun serve --models ~/models --loras ~/loras
///
/// Example: SDRUN_API_KEY=secret sdrun serve --listen 0.0.0.0:7860 --models ~/models
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = LISTEN)]
    listen: SocketAddr,

    /// Another port; 0 takes any free one
    #[arg(long, value_name = "N")]
    port: Option<u16>,

    /// What clients must show, as a bearer token, as a password, or as USER:PASSWORD; better set in SDRUN_API_KEY, where other users of
    /// this machine do not see it
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// Let this web page use the server from a browser, such as https://lite.koboldai.net (repeatable)
    #[arg(long = "allow-origin", value_name = "ORIGIN")]
    origins: Vec<String>,

    /// Stop when this process is gone
    #[arg(long, value_name = "PID")]
    parent_pid: Option<u32>,

    /// Model for requests that name none [default: the first in --models]
    #[arg(short, long, value_name = "NAME")]
    model: Option<String>,

    #[command(flatten)]
    folders: FolderArgs,

    /// Provider to use [default: the best one that works on this machine]
    #[arg(short, long, value_name = "ID", add = complete::providers(), help_heading = "Provider")]
    provider: Option<String>,

    /// Device to use: an id, an index or part of a name, as `sdrun devices` lists them; with several, each draws its own pictures
    /// (repeatable)
    #[arg(long = "device", value_name = "DEVICE", add = complete::devices(), help_heading = "Provider")]
    devices: Vec<String>,

    /// Number of threads on CPU devices [default: all cores]
    #[arg(long, value_name = "N", help_heading = "Provider")]
    threads: Option<NonZeroUsize>,

    /// Run providers in worker processes even if they need no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long, help_heading = "Provider")]
    isolate: bool,

    /// Run providers in worker processes, and kill one if a call takes longer than this
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "Provider")]
    time_limit: Option<Duration>,

    #[command(flatten)]
    build: BuildArgs,

    #[command(flatten)]
    ignored: Ignored,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Files")]
struct FolderArgs {
    /// Folder of checkpoints, diffusers folders and folders of ONNX models
    #[arg(long, alias = "ckpt-dir", value_name = "FOLDER")]
    models: Option<PathBuf>,

    /// Folder of adapters, which prompts name as <lora:NAME:STRENGTH>
    #[arg(long, alias = "lora-dir", value_name = "FOLDER")]
    loras: Option<PathBuf>,

    /// Folder of embeddings (textual inversion), which prompts name by their file's name
    #[arg(long, alias = "embeddings-dir", value_name = "FOLDER")]
    embeddings: Option<PathBuf>,

    /// Folder of autoencoders
    #[arg(long, alias = "vae-dir", value_name = "FOLDER")]
    vaes: Option<PathBuf>,

    /// Folder of text encoders
    #[arg(long, alias = "text-encoder-dir", value_name = "FOLDER")]
    text_encoders: Option<PathBuf>,

    /// Folder of ControlNets
    #[arg(long, alias = "controlnet-dir", value_name = "FOLDER")]
    control_nets: Option<PathBuf>,

    /// Folder of files of ESRGAN and Real-ESRGAN
    #[arg(long, alias = "realesrgan-models-path", value_name = "FOLDER")]
    upscalers: Option<PathBuf>,

    /// Folder of wildcards: __NAME__ in a prompt becomes a line of the file NAME.txt in it
    #[arg(long, value_name = "FOLDER")]
    wildcards: Option<PathBuf>,
}

/// What Easy Diffusion tells its engines and sdrun decides by itself, or has no use for.
#[derive(clap::Args)]
struct Ignored {
    #[arg(long, hide = true)]
    hypernetwork_dir: Option<PathBuf>,
    #[arg(long, hide = true)]
    gfpgan_models_path: Option<PathBuf>,
    #[arg(long, hide = true)]
    codeformer_models_path: Option<PathBuf>,
    #[arg(long, hide = true)]
    diffusion_fa: bool,
    #[arg(long, hide = true)]
    chroma_disable_dit_mask: bool,
    #[arg(long, hide = true)]
    offload_to_cpu: bool,
    #[arg(long, hide = true)]
    vae_tiling: bool,
    #[arg(long, hide = true)]
    vae_tile_size: Option<String>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    if args.build.bake {
        let message = "--bake makes engines that take no other weights, and a server changes them";
        return Err(Error::invalid(message).into());
    }
    let FolderArgs { models, loras, embeddings, vaes, text_encoders, control_nets, upscalers, wildcards } =
        &args.folders;
    let weights = [models, loras, embeddings, vaes, text_encoders, control_nets, upscalers];
    let registry = context.registry_for(weights.into_iter().flatten().cloned().collect())?;
    let lanes = lanes(args, &registry, context)?;
    let threads = args.threads.or(context.config.threads).map(NonZeroUsize::get);
    // Everything but the device is the same for all.
    let base = args.build.options(Device::new("", "", DeviceKind::Cpu, ""), false, context).threads(threads);
    let options = move |device| {
        let mut options = base.clone();
        options.device = device;
        options
    };
    let mut listen = args.listen;
    if let Some(port) = args.port {
        listen.set_port(port);
    }
    let key = args.api_key.clone().or(std::env::var("SDRUN_API_KEY").ok());
    let config = Config {
        listen,
        key: key.filter(|key| !key.is_empty()),
        origins: args.origins.clone(),
        folders: Folders {
            models: models.clone(),
            loras: loras.clone(),
            embeddings: embeddings.clone(),
            vaes: vaes.clone(),
            text_encoders: text_encoders.clone(),
            control_nets: control_nets.clone(),
            upscalers: upscalers.clone(),
            wildcards: wildcards.clone(),
        },
        model: args.model.clone(),
        registry,
        lanes,
        options: Arc::new(options),
        stop: context.cancel_flag(),
        parent: args.parent_pid,
    };
    context.saves_when_cancelled();
    serve(config, &mut |address| context.note(&format!("ready: http://{address}")))?;
    Ok(ExitCode::SUCCESS)
}

/// A lane for each device that the user names, or else for the one of the config file, or the best.
fn lanes(args: &Args, registry: &Registry, context: &Context) -> anyhow::Result<Vec<Lane>> {
    let configured = context.config.device.clone().filter(|_| args.provider.is_none());
    let named = args.devices.iter().cloned().map(Some);
    let devices: Vec<Option<String>> =
        if args.devices.is_empty() { vec![configured] } else { named.collect() };
    let one = |device| {
        let mut wishes = Wishes::new();
        wishes.device = device;
        wishes.isolation = isolation(args.isolate, args.time_limit, CANCEL_LIMIT);
        Ok(lane(registry, args.provider.as_deref(), wishes)?)
    };
    devices.into_iter().map(one).collect()
}
