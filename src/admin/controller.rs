//! The gateway's controller, which answers the requests of operators about the group.

use control::admin::View;
use tokio::sync::watch;
use tonic::Status;

/// The controller as seen by the admin API.
#[derive(Clone, Debug)]
pub enum ControllerAccess {
    /// In this process; `None` while it starts.
    Embedded(watch::Receiver<Option<View>>),
    /// In another process; the URLs that the gateway dials.
    Remote(Vec<String>),
}

impl ControllerAccess {
    /// The state of the embedded controller.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with its address if it is not embedded, `UNAVAILABLE` while it starts.
    pub fn view(&self) -> Result<View, Status> {
        match self {
            Self::Embedded(view) => {
                view.borrow().clone().ok_or_else(|| Status::unavailable("the embedded controller starts; try again"))
            }
            Self::Remote(urls) => Err(Status::failed_precondition(format!(
                "this gateway follows the controller at {}, which alone knows this; give its admin socket (key `admin.listen` of \
                 its file) as --server unix:PATH",
                urls.join(", ")
            ))),
        }
    }
}
