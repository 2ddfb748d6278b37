//! sdrun's own API: jobs, their progress as it happens, and their pictures.

use super::body::{Sent, aside};
use crate::{
    app::App,
    fault::Fault,
    job::{Job, State as JobState},
    order::Order,
    task::Task,
};
use axum::{
    Json, Router,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::{get, post},
};
use futures_util::{Stream, stream};
use sdrun_diffusion::pipeline::LoadedNetwork;
use serde::Serialize;
use std::{convert::Infallible, sync::Arc};
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new()
        .route("/jobs", get(list).post(create))
        .route("/jobs/{id}", get(show))
        .route("/jobs/{id}/cancel", post(cancel))
        .route("/jobs/{id}/events", get(events))
        .route("/jobs/{id}/pictures/{number}", get(picture))
        .route("/jobs/{id}/preview", get(preview))
}

/// A job as clients see it.
#[derive(Serialize, ToSchema)]
pub(super) struct JobView {
    id: String,
    state: JobState,
    /// Jobs before it, while it is queued.
    position: Option<usize>,
    /// What happens now, for people.
    phase: String,
    /// Steps that are done, of all pictures.
    done: usize,
    total: usize,
    seconds_left: Option<f64>,
    /// Number of the latest preview; 0 before the first.
    preview: u64,
    pictures: Vec<PictureView>,
    /// The networks that ran: `part`, `provider`, `device`, `precision`, `origin` (`built`, `cached`, `refitted` or `kept`) and `seconds`.
    #[schema(value_type = Vec<Object>)]
    networks: Vec<LoadedNetwork>,
    warnings: Vec<String>,
    error: Option<Fault>,
    /// How long it took, without waiting.
    seconds: Option<f64>,
}

/// A finished picture.
#[derive(Serialize, ToSchema)]
struct PictureView {
    /// Its number, from 0.
    number: usize,
    seed: Option<u64>,
    width: u32,
    height: u32,
    url: String,
    /// A1111's text of the settings.
    parameters: String,
}

/// Jobs, the newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct JobList {
    jobs: Vec<JobView>,
}

fn view(app: &App, job: &Job) -> JobView {
    let status = job.status();
    let pictures = status.pictures.iter().enumerate().map(|(number, drawn)| PictureView {
        number,
        seed: drawn.record.as_ref().and_then(|record| record.seed),
        width: drawn.width,
        height: drawn.height,
        url: format!("/api/jobs/{}/pictures/{number}", job.id),
        parameters: drawn.parameters.clone(),
    });
    JobView {
        id: job.id.clone(),
        state: status.state,
        position: app.position(&job.id),
        phase: status.phase,
        done: status.done,
        total: status.total,
        seconds_left: status.seconds_left,
        preview: status.preview.map_or(0, |(number, _)| number),
        pictures: pictures.collect(),
        networks: status.networks,
        warnings: status.warnings,
        error: status.fault,
        seconds: status.seconds,
    }
}

fn find(app: &App, id: &str) -> Result<Arc<Job>, Fault> {
    app.jobs.get(id).ok_or_else(|| Fault::not_found(format!("there is no job {id:?}, or not any more")))
}

/// Order pictures
#[utoipa::path(post, path = "/api/jobs", request_body = Order, responses(
    (status = 202, body = JobView), (status = 400), (status = 404), (status = 413), (status = 422), (status = 429)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Sent(order, _): Sent<Order, Fault>,
) -> Result<Response, Fault> {
    let shared = app.clone();
    let draw = aside(move || {
        let model = order.model.clone().unwrap_or_else(|| shared.model());
        Order { model: Some(model), ..order }.draw(&shared.library)
    });
    let job = app.submit(Task::Draw(Box::new(draw.await?)), None)?;
    Ok((StatusCode::ACCEPTED, Json(view(&app, &job))).into_response())
}

/// All jobs that the server remembers
#[utoipa::path(get, path = "/api/jobs", responses((status = 200, body = JobList)))]
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<JobList> {
    Json(JobList { jobs: app.jobs.all().iter().map(|job| view(&app, job)).collect() })
}

/// A job
#[utoipa::path(get, path = "/api/jobs/{id}", params(("id" = String, Path)), responses(
    (status = 200, body = JobView), (status = 404)))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<JobView>, Fault> {
    Ok(Json(view(&app, &*find(&app, &id)?)))
}

/// Stop a job; its finished pictures stay
#[utoipa::path(post, path = "/api/jobs/{id}/cancel", params(("id" = String, Path)), responses(
    (status = 200, body = JobView), (status = 404)))]
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<JobView>, Fault> {
    let job = find(&app, &id)?;
    app.cancel(&job);
    Ok(Json(view(&app, &job)))
}

/// The job now and after each change, as server-sent events named `job`
#[utoipa::path(get, path = "/api/jobs/{id}/events", params(("id" = String, Path)), responses(
    (status = 200, content_type = "text/event-stream", body = String), (status = 404)))]
pub(super) async fn events(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Fault> {
    let job = find(&app, &id)?;
    let watch = job.watch();
    let changes = stream::unfold(Some((app, job, watch, false)), async |state| {
        let (app, job, mut watch, waits) = state?;
        if waits {
            // The job lives as long as this stream.
            watch.changed().await.ok()?;
        }
        let last = watch.borrow_and_update().state.is_last();
        let event = Event::default().event("job").json_data(view(&app, &job)).unwrap_or_default();
        Some((Ok(event), (!last).then_some((app, job, watch, true))))
    });
    Ok(Sse::new(changes).keep_alive(KeepAlive::default()))
}

/// A finished picture with its metadata
#[utoipa::path(get, path = "/api/jobs/{id}/pictures/{number}", params(("id" = String, Path), ("number" = usize, Path)),
    responses((status = 200, content_type = "image/png", body = Vec<u8>), (status = 400), (status = 404)))]
pub(super) async fn picture(
    State(app): State<Arc<App>>,
    Path((id, number)): Path<(String, String)>,
) -> Result<Response, Fault> {
    let status = find(&app, &id)?.status();
    let number = number.parse::<usize>().ok();
    let drawn = number.and_then(|number| status.pictures.get(number)).ok_or_else(|| {
        Fault::not_found(format!("the job {id} has no such picture, or not yet, or it was sent already"))
    })?;
    let seed = drawn.record.as_ref().and_then(|record| record.seed).unwrap_or_default();
    let ending = drawn.media_type.trim_start_matches("image/");
    let name = format!("inline; filename=\"sdrun-{seed}.{ending}\"");
    let headers = [(header::CONTENT_TYPE, drawn.media_type.to_string()), (header::CONTENT_DISPOSITION, name)];
    Ok((headers, drawn.bytes.clone()).into_response())
}

/// A rough picture of what is being drawn
#[utoipa::path(get, path = "/api/jobs/{id}/preview", params(("id" = String, Path)), responses(
    (status = 200, content_type = "image/jpeg", body = Vec<u8>), (status = 404)))]
pub(super) async fn preview(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Fault> {
    let preview = find(&app, &id)?.status().preview;
    let (_, bytes) = preview.ok_or_else(|| Fault::not_found(format!("the job {id} has no preview yet")))?;
    Ok(([(header::CONTENT_TYPE, "image/jpeg")], bytes.to_vec()).into_response())
}
