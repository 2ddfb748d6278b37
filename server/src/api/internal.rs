//! What Easy Diffusion asks an engine: whether it lives, and how far a task is.

use super::body::Sent;
use crate::{
    app::App,
    fault::{Fault, SdFault},
    job::State as JobState,
    pictures,
};
use axum::{
    Json, Router,
    extract::State,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new().route("/ping", get(ping)).route("/progress", post(progress))
}

/// Whether the server lives
#[utoipa::path(get, path = "/internal/ping", responses((status = 200, body = Object)))]
pub(super) async fn ping() -> Json<serde_json::Value> {
    Json(serde_json::json!({}))
}

/// Which task to tell about.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct Asked {
    /// The task's `force_task_id`, or the id of a job.
    id_task: String,
    /// Whether a preview is wanted.
    live_preview: Option<bool>,
    /// The number of the last preview that the client has.
    id_live_preview: Option<i64>,
}

/// How far a task is.
#[derive(Serialize, ToSchema)]
pub(super) struct Progress {
    active: bool,
    queued: bool,
    completed: bool,
    /// From 0 to 1.
    progress: Option<f64>,
    /// Seconds.
    eta: Option<f64>,
    /// A picture as `data:image/jpeg;base64,…`.
    live_preview: Option<String>,
    id_live_preview: i64,
    textinfo: String,
}

/// How far a task is
#[utoipa::path(post, path = "/internal/progress", request_body = Asked, responses(
    (status = 200, body = Progress), (status = 400), (status = 404), (status = 413)))]
pub(super) async fn progress(
    State(app): State<Arc<App>>,
    Sent(asked, _): Sent<Asked, SdFault>,
) -> Result<Json<Progress>, SdFault> {
    let unknown = || Fault::not_found(format!("there is no task {:?}", asked.id_task));
    let status = app.jobs.get(&asked.id_task).ok_or_else(unknown)?.status();
    let last = asked.id_live_preview.unwrap_or(-1);
    let new = status.preview.filter(|(number, _)| asked.live_preview == Some(true) && *number as i64 > last);
    Ok(Json(Progress {
        active: status.state == JobState::Running,
        queued: status.state == JobState::Queued,
        completed: status.state.is_last(),
        progress: (status.total > 0).then(|| status.done as f64 / status.total as f64),
        eta: status.seconds_left,
        id_live_preview: new.as_ref().map_or(last, |(number, _)| *number as i64),
        live_preview: new.map(|(_, bytes)| format!("data:image/jpeg;base64,{}", pictures::encode(&bytes))),
        textinfo: status.phase,
    }))
}
