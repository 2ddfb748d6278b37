//! OpenAI's API for images, for clients such as Open WebUI and the package `openai`.

use super::body::{MOST_BYTES, Sent, aside};
use crate::{
    app::App,
    fault::{Fault, OpenAiFault},
    job::{State as JobState, Status},
    order::{Order, format},
    pictures,
    task::Task,
};
use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Multipart, State, multipart::MultipartRejection},
    http::HeaderMap,
    routing::{get, post},
};
use sdrun_diffusion::{
    file::Format,
    picture::{Fit, Mask},
    pipeline::{Content, Inpaint, LoadedNetwork, Start},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new()
        .route("/models", get(models))
        .route("/images/generations", post(generations))
        .route("/images/edits", post(edits))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
}

/// A request for pictures. Settings that OpenAI does not have bear the names of [`Order`], and others mean nothing here.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct Generation {
    prompt: String,
    /// A model of the library. OpenAI's own names mean the server's default model.
    model: Option<String>,
    /// Number of pictures.
    n: Option<usize>,
    /// Such as `512x512`; `auto` is the model's usual size.
    size: Option<String>,
    /// `b64_json` (default) or `url`.
    response_format: Option<String>,
    /// `png` (default), `jpeg` or `webp`.
    output_format: Option<String>,
    /// JPEG's quality, from 0 to 100.
    output_compression: Option<u8>,
    /// Not supported.
    stream: Option<bool>,
    negative_prompt: Option<String>,
    steps: Option<usize>,
    cfg_scale: Option<f64>,
    sampler: Option<String>,
    schedule: Option<String>,
    seed: Option<u64>,
    /// How much an edit changes the picture.
    strength: Option<f64>,
}

/// Pictures.
#[derive(Serialize, ToSchema)]
pub(super) struct Images {
    /// Seconds since 1970.
    created: u64,
    data: Vec<Image>,
    output_format: &'static str,
    /// The networks that ran: `part`, `provider`, `device`, `precision`, `origin` (`built`, `cached`, `refitted` or `kept`) and `seconds`.
    #[schema(value_type = Vec<Object>)]
    networks: Vec<LoadedNetwork>,
}

/// A picture.
#[derive(Serialize, ToSchema)]
struct Image {
    #[serde(skip_serializing_if = "Option::is_none")]
    b64_json: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

/// The models of the library
#[utoipa::path(get, path = "/v1/models", responses((status = 200, body = Value)))]
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let listing = app.library.listing();
    let model = |entry: &crate::library::Entry| serde_json::json!({ "id": entry.name, "object": "model", "created": 0, "owned_by": "sdrun" });
    let data: Vec<Value> = listing.models.iter().map(model).collect();
    Json(serde_json::json!({ "object": "list", "data": data }))
}

/// Draw pictures
#[utoipa::path(post, path = "/v1/images/generations", request_body = Generation, responses(
    (status = 200, body = Images), (status = 400), (status = 404), (status = 409), (status = 413), (status = 422),
    (status = 429)))]
pub(super) async fn generations(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Sent(asked, _): Sent<Generation, OpenAiFault>,
) -> Result<Json<Images>, OpenAiFault> {
    Ok(run(&app, &headers, asked, None).await?)
}

/// Files and texts of an edit.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes the form")]
pub(super) struct EditForm {
    /// The picture; also as `image[]`.
    #[schema(value_type = String, format = Binary)]
    image: Vec<u8>,
    /// Transparent where the picture shall change.
    #[schema(value_type = Option<String>, format = Binary)]
    mask: Option<Vec<u8>>,
    prompt: String,
    model: Option<String>,
    n: Option<String>,
    size: Option<String>,
}

/// Change a picture
#[utoipa::path(post, path = "/v1/images/edits", request_body(content = EditForm, content_type = "multipart/form-data"), responses(
    (status = 200, body = Images), (status = 400), (status = 404), (status = 409), (status = 413), (status = 422),
    (status = 429)))]
pub(super) async fn edits(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Json<Images>, OpenAiFault> {
    let wrong = |why: String| Fault::invalid(format!("the form cannot be read: {why}"));
    let mut form = form.map_err(|why| wrong(why.body_text()))?;
    let (mut images, mut mask, mut texts) = (Vec::new(), None, Map::new());
    while let Some(field) = form.next_field().await.map_err(|why| wrong(why.body_text()))? {
        let name = field.name().unwrap_or_default().to_string();
        let bytes = field.bytes().await.map_err(|why| wrong(why.body_text()))?;
        match &*name {
            "image" | "image[]" => images.push(bytes),
            "mask" => mask = Some(bytes),
            _ => {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                // Numbers come as texts.
                let number = ["n", "steps", "seed", "cfg_scale", "strength", "output_compression", "stream"];
                let value = if number.contains(&&*name) {
                    serde_json::from_str(&text).unwrap_or(Value::String(text))
                } else {
                    Value::String(text)
                };
                // `None` of Python, written as a text.
                if value != "None" && value != "" {
                    texts.insert(name, value);
                }
            }
        }
    }
    let asked: Generation =
        serde_json::from_value(Value::Object(texts)).map_err(|why| wrong(why.to_string()))?;
    let strength = asked.strength;
    let begin = aside(move || {
        let [image] = &images[..] else {
            return Err(Fault::invalid(format!("an edit takes one image, and {} were sent", images.len())));
        };
        let read = pictures::of_bytes("image", image)?;
        let erased = match mask {
            Some(mask) => pictures::of_bytes("mask", &mask)?.erased(),
            None => read.erased(),
        };
        let mask = erased.map(Mask::new);
        // What is masked shall be new, and the whole only changed.
        let strength = strength.unwrap_or(if mask.is_some() { 1.0 } else { 0.75 });
        let (picture, content) = (read.rgb(), Content::Original);
        let inpaint = mask.map(|mask| Inpaint { mask, blur: 4.0, content, only_masked: None });
        Ok(Start { picture, fit: Fit::Crop, strength, inpaint })
    });
    let begin = begin.await?;
    Ok(run(&app, &headers, asked, Some(begin)).await?)
}

async fn run(
    app: &Arc<App>,
    headers: &HeaderMap,
    asked: Generation,
    edit: Option<Start>,
) -> Result<Json<Images>, Fault> {
    let by_url = match asked.response_format.as_deref() {
        None | Some("b64_json") => false,
        Some("url") => true,
        Some(other) => {
            return Err(Fault::invalid(format!("response_format is b64_json or url, not {other:?}")));
        }
    };
    if asked.stream == Some(true) {
        return Err(Fault::unsupported("pictures cannot be streamed here: leave out `stream`"));
    }
    let kind = asked.output_format.as_deref().map(format).transpose()?.unwrap_or(Format::Png);
    let quality = asked.output_compression;
    let shared = app.clone();
    let draw = aside(move || {
        let mut draw = order(&shared, &asked)?.draw(&shared.library)?;
        draw.wanted.edit = edit;
        draw.output.format = kind;
        draw.output.quality = quality.map_or(draw.output.quality, |quality| quality.clamp(1, 100));
        draw.output.previews = false;
        Ok(draw)
    });
    let task = Task::Draw(Box::new(draw.await?));
    let (status, id) = if by_url {
        // The pictures stay until they are fetched.
        let (job, status) = app.finish(task, None).await?;
        (status, job.id.clone())
    } else {
        (app.run(task, None).await?, String::new())
    };
    finished(&status)?;
    let host = headers.get("host").and_then(|host| host.to_str().ok()).unwrap_or_default();
    let data = status.pictures.iter().enumerate().map(|(number, drawn)| match by_url {
        true => Image { b64_json: None, url: Some(format!("http://{host}/api/jobs/{id}/pictures/{number}")) },
        false => Image { b64_json: Some(pictures::encode(&drawn.bytes)), url: None },
    });
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let output_format = kind.media_type().trim_start_matches("image/");
    let (data, networks) = (data.collect(), status.networks.clone());
    Ok(Json(Images { created, data, output_format, networks }))
}

/// Fails unless a job has ended well.
pub(super) fn finished(status: &Status) -> Result<(), Fault> {
    match (&status.fault, status.state) {
        (Some(fault), _) => Err(fault.clone()),
        (None, JobState::Done) => Ok(()),
        _ => Err(Fault::cancelled()),
    }
}

fn order(app: &App, asked: &Generation) -> Result<Order, Fault> {
    let size = asked.size.as_deref().filter(|size| !["", "auto"].contains(size));
    let size = size.map(|size| {
        let sides = size.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
        sides.ok_or_else(|| Fault::invalid(format!("the size is not like 512x512: {size:?}")))
    });
    let (width, height) = size.transpose()?.unzip();
    let own = |name: &str| {
        name.is_empty()
            || ["dall-e", "gpt-image", "chatgpt-image"].iter().any(|start| name.starts_with(start))
    };
    let model = asked.model.clone().filter(|name| !own(name)).unwrap_or_else(|| app.model());
    Ok(Order {
        prompt: asked.prompt.clone(),
        negative_prompt: asked.negative_prompt.clone(),
        model: Some(model),
        width,
        height,
        steps: asked.steps,
        cfg_scale: asked.cfg_scale,
        sampler: asked.sampler.clone(),
        schedule: asked.schedule.clone(),
        seed: asked.seed,
        count: asked.n,
        ..Order::default()
    })
}
