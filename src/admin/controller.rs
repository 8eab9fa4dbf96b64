//! Where the gateway's controller is: what operators ask of a group is its to answer.

use control::admin::View;
use tokio::sync::watch;
use tonic::Status;

/// The controller, as far as operators may ask for it here.
#[derive(Clone, Debug)]
pub enum Seat {
    /// In this process; none while it starts.
    Embedded(watch::Receiver<Option<View>>),
    /// Elsewhere: where the gateway dials it.
    Remote(Vec<String>),
}

impl Seat {
    /// What the embedded controller knows.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with whom to ask when it is not embedded, `UNAVAILABLE` while it starts.
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
