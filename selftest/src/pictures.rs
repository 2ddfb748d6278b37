//! Pictures of the demo model, and whether they show what their prompts say.

use crate::{
    Sample,
    judge::{judge, prompts},
    rig::{Problem, Rig},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use image::{ImageFormat, RgbImage};
use sdrun::abi::{Error, Precision};
use sdrun_diffusion::{
    demo,
    pipeline::{Engines, Event, Files, Kept, Parts, Request, generate},
};
use std::{io::Cursor, time::Instant};

/// Every how many of the prompts is drawn: 16 in all.
const STEP: usize = 8;

/// The share of pictures that have to be right. On the reference, in fp32, 92 % of all prompts are.
const LEAST: f64 = 0.8;

/// Draws pictures in one precision; `drawn` gets them.
pub(crate) fn check(
    rig: &mut Rig<'_>,
    precision: Precision,
    drawn: &mut Vec<Sample>,
) -> Result<String, Problem> {
    let paths = rig.registry.paths();
    let failed = |error: sdrun_diffusion::pipeline::Error| match error.core() {
        Some(core) => Problem::Error(Error::new(core.code(), error.to_string()).into()),
        None => Problem::Wrong(error.to_string()),
    };
    let files = Files { model: demo::find(demo::NAME, paths)?, ..Files::default() };
    let parts = Parts::open(&files, paths, rig.host()).map_err(failed)?;
    let plain = rig.options(precision);
    // The only device that it is asked for.
    let options = |_| plain.clone();
    let mut engines = Engines::new(&options);
    engines.only = Some((rig.provider()?, rig.device.clone()));
    engines.kept = Some(Kept::default());
    let (mut seconds, mut widened) = (Vec::new(), false);
    for (at, prompt) in prompts().iter().enumerate().step_by(STEP) {
        let request = Request { prompt: prompt.caption.clone(), seed: at as u64, ..Request::default() };
        let request = request.resolve(&parts).map_err(failed)?;
        let started = Instant::now();
        let mut picture = None;
        generate(rig.registry, &parts, &request, &engines, rig.host(), &mut |event| match event {
            Event::Picture(made) => picture = Some(made.into_rgb()),
            Event::Widened { .. } => widened = true,
            _ => {}
        })
        .map_err(failed)?;
        seconds.push(started.elapsed().as_secs_f64());
        let Some(picture) = picture else { return Err(Problem::Wrong("no picture was drawn".into())) };
        let right = judge(prompt, &picture).all();
        drawn.push(Sample { prompt: prompt.caption.clone(), precision, right, png: png(&picture)? });
    }
    // The first one builds and loads the networks.
    let first = seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    let right = drawn.iter().filter(|sample| sample.right).count();
    let wider = if widened { "; values overflowed, so fp32 took over" } else { "" };
    let detail = format!(
        "{right} of {} show what was asked for; {:.2} s each, the first one {first:.2} s{wider}",
        drawn.len(),
        seconds.get(seconds.len() / 2).copied().unwrap_or(first)
    );
    match right as f64 >= LEAST * drawn.len() as f64 {
        true => Ok(detail),
        false => Err(Problem::Wrong(detail)),
    }
}

/// A PNG file, in base64.
fn png(picture: &RgbImage) -> Result<String, Problem> {
    let mut file = Cursor::new(Vec::new());
    picture
        .write_to(&mut file, ImageFormat::Png)
        .map_err(|e| Error::internal(format!("cannot write a picture: {e}")))
        .map_err(sdrun::Error::from)?;
    Ok(BASE64_STANDARD.encode(file.into_inner()))
}
