//! Bodies of requests, with faults in the form of each API.

use crate::fault::Fault;
use axum::{
    body::{Bytes, to_bytes},
    extract::{FromRequest, Request},
    http::StatusCode,
    response::IntoResponse,
};
use serde::de::DeserializeOwned;
use std::marker::PhantomData;

/// The most bytes of a body.
pub(crate) const MOST_BYTES: usize = 64 << 20;

/// A body in JSON. The type of its content does not matter, because some clients state none. `E` is the form of faults.
pub(crate) struct Sent<T, E>(pub(crate) T, pub(crate) PhantomData<E>);

impl<S: Send + Sync, T: DeserializeOwned, E: From<Fault> + IntoResponse> FromRequest<S> for Sent<T, E> {
    type Rejection = E;

    async fn from_request(request: Request, _: &S) -> Result<Self, E> {
        let bytes = bytes(request).await?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|why| Fault::invalid(format!("the body is not the JSON expected here: {why}")))?;
        Ok(Sent(value, PhantomData))
    }
}

/// A whole body.
///
/// # Errors
/// 413 for one that is too large.
pub(crate) async fn bytes(request: Request) -> Result<Bytes, Fault> {
    to_bytes(request.into_body(), MOST_BYTES).await.map_err(|why| {
        let message = format!("the body cannot be read: {why} (at most {} MB)", MOST_BYTES >> 20);
        Fault::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    })
}

/// Does work that takes more than a moment away from the threads that serve.
///
/// # Errors
/// Those of `work`.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(Fault::internal("sdrun has a bug: see its log")))
}
