//! Where the daemon's sockets lie.

use std::path::{Path, PathBuf};

use flextensord_proto::name::{self, NameError};

/// Environment variable with the path of `flextensord.sock`.
pub const SOCKET_VARIABLE: &str = "FLEXTENSORD_SOCKET";
/// Environment variable with the runtime directory.
pub const RUNTIME_DIR_VARIABLE: &str = "FLEXTENSORD_RUNTIME_DIR";
/// Environment variable with the name of the instance.
pub const INSTANCE_VARIABLE: &str = "FLEXTENSORD_INSTANCE";

/// Name of the gRPC socket in an instance's directory.
const SOCKET: &str = "flextensord.sock";
/// Name of the descriptor socket, beside it.
const DESCRIPTOR_SOCKET: &str = "fd.sock";
/// Most bytes of a unix socket's path, its final zero not counted (unix(7)).
const PATH_BYTES: usize = 107;

/// Why no socket can be named.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    /// Neither root nor a session with a runtime directory.
    #[error(
        "no runtime directory: not root, and XDG_RUNTIME_DIR is not set; name one with --runtime-dir or {RUNTIME_DIR_VARIABLE}"
    )]
    NoRuntimeDir,
    /// The kernel takes no longer path.
    #[error("socket path {} has {bytes} bytes, over the limit of {PATH_BYTES}", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        bytes: usize,
    },
    /// The path is not text, which gRPC needs.
    #[error("socket path {} is not valid UTF-8", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },
    /// A network address in place of a path.
    #[error(
        "{address} is a network address; flextensord serves on a unix socket only, because weights are shared as memory of one machine and there is no data plane over TCP"
    )]
    Network {
        /// What was given.
        address: String,
    },
    /// The instance has an illegal name.
    #[error("instance {instance:?}: {reason}")]
    Instance {
        /// What was given.
        instance: String,
        /// The rule that it breaks.
        reason: NameError,
    },
}

/// The two sockets of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// gRPC.
    pub socket: PathBuf,
    /// Descriptor passing.
    pub descriptor_socket: PathBuf,
}

/// What a caller says about where the daemon is; what is missing comes from the
/// environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Address {
    /// Path of `flextensord.sock`; goes before everything else.
    pub socket: Option<PathBuf>,
    /// The runtime directory that holds the instances' directories.
    pub runtime_dir: Option<PathBuf>,
    /// Name of the instance.
    pub instance: Option<String>,
}

impl Address {
    /// The sockets, from this address and the process's environment: the explicit
    /// socket, `FLEXTENSORD_SOCKET`, or the runtime directory and the instance (flag,
    /// then variable, then `/run/flextensord` as root or `$XDG_RUNTIME_DIR/flextensord`,
    /// and `default`).
    ///
    /// A runtime directory or instance in the address goes before the variable
    /// `FLEXTENSORD_SOCKET`: what is said explicitly wins.
    ///
    /// # Errors
    /// [`LocateError`].
    pub fn locate(&self) -> Result<Location, LocateError> {
        let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        self.locate_in(variable, nix::unistd::geteuid().is_root())
    }

    /// As [`Address::locate`], with the environment given.
    pub(crate) fn locate_in(
        &self,
        variable: impl Fn(&str) -> Option<PathBuf>,
        root: bool,
    ) -> Result<Location, LocateError> {
        let variable = |name: &str| variable(name).filter(|value| !value.as_os_str().is_empty());
        let placed = self.runtime_dir.is_some() || self.instance.is_some();
        let named = self
            .socket
            .clone()
            .or_else(|| variable(SOCKET_VARIABLE).filter(|_| !placed));
        let socket = match named {
            Some(socket) => local_path(socket)?,
            None => {
                let instance = match &self.instance {
                    Some(instance) => instance.clone(),
                    None => variable(INSTANCE_VARIABLE).map_or_else(
                        || "default".to_owned(),
                        |value| value.to_string_lossy().into_owned(),
                    ),
                };
                name::check(&instance).map_err(|reason| LocateError::Instance {
                    instance: instance.clone(),
                    reason,
                })?;
                let directory = match &self.runtime_dir {
                    Some(directory) => Some(directory.clone()),
                    None => variable(RUNTIME_DIR_VARIABLE),
                };
                let directory = directory
                    .or_else(|| root.then(|| PathBuf::from("/run/flextensord")))
                    .or_else(|| variable("XDG_RUNTIME_DIR").map(|dir| dir.join("flextensord")))
                    .ok_or(LocateError::NoRuntimeDir)?;
                directory.join(instance).join(SOCKET)
            }
        };
        let descriptor_socket = socket.with_file_name(DESCRIPTOR_SOCKET);
        for path in [&socket, &descriptor_socket] {
            check_path(path)?;
        }
        Ok(Location {
            socket,
            descriptor_socket,
        })
    }
}

impl From<&Path> for Address {
    fn from(socket: &Path) -> Self {
        Self {
            socket: Some(socket.to_owned()),
            ..Self::default()
        }
    }
}

fn check_path(path: &Path) -> Result<(), LocateError> {
    if path.to_str().is_none() {
        return Err(LocateError::NotText {
            path: path.to_owned(),
        });
    }
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES {
        return Err(LocateError::TooLong {
            path: path.to_owned(),
            bytes,
        });
    }
    Ok(())
}

/// The path in `unix:/path`, `unix:///path` or a plain path; network addresses are refused.
fn local_path(given: PathBuf) -> Result<PathBuf, LocateError> {
    let Some(text) = given.to_str() else {
        return Ok(given);
    };
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(PathBuf::from(path.strip_prefix("//").unwrap_or(path)));
    }
    let scheme = ["tcp:", "http:", "https:", "grpc:", "dns:", "ipv4:", "ipv6:"];
    let port =
        |(_, port): (&str, &str)| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let network = scheme.iter().any(|scheme| text.starts_with(scheme))
        || (!text.contains('/') && text.rsplit_once(':').is_some_and(port));
    if network {
        return Err(LocateError::Network {
            address: text.to_owned(),
        });
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locate(
        address: &Address,
        variables: &[(&str, &str)],
        root: bool,
    ) -> Result<String, LocateError> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| PathBuf::from(value))
        };
        let location = address.locate_in(variable, root)?;
        assert_eq!(
            location.descriptor_socket,
            location.socket.with_file_name("fd.sock")
        );
        Ok(location.socket.to_str().unwrap().to_owned())
    }

    #[test]
    fn what_is_said_explicitly_goes_before_the_environment() {
        let environment = [
            (SOCKET_VARIABLE, "/env/flextensord.sock"),
            (RUNTIME_DIR_VARIABLE, "/run/env"),
            (INSTANCE_VARIABLE, "two"),
            ("XDG_RUNTIME_DIR", "/run/user/7"),
        ];
        let socket = Address::from(Path::new("/x/flextensord.sock"));
        assert_eq!(
            locate(&socket, &environment, false).unwrap(),
            "/x/flextensord.sock"
        );
        let nothing = Address::default();
        assert_eq!(
            locate(&nothing, &environment, false).unwrap(),
            "/env/flextensord.sock"
        );
        let instance = Address {
            instance: Some("three".to_owned()),
            ..Address::default()
        };
        assert_eq!(
            locate(&instance, &environment, false).unwrap(),
            "/run/env/three/flextensord.sock"
        );
        assert_eq!(
            locate(&nothing, &environment[1..], false).unwrap(),
            "/run/env/two/flextensord.sock"
        );
    }

    #[test]
    fn root_and_users_have_their_own_default() {
        let user = [("XDG_RUNTIME_DIR", "/run/user/7")];
        let nothing = Address::default();
        assert_eq!(
            locate(&nothing, &user, false).unwrap(),
            "/run/user/7/flextensord/default/flextensord.sock"
        );
        assert_eq!(
            locate(&nothing, &user, true).unwrap(),
            "/run/flextensord/default/flextensord.sock"
        );
        let error = locate(&nothing, &[], false).unwrap_err();
        assert!(error.to_string().contains("--runtime-dir"), "{error}");
    }

    #[test]
    fn network_addresses_long_paths_and_bad_instances_are_refused() {
        for address in ["tcp://h:1", "http://h", "localhost:8080", "10.0.0.1:9"] {
            let error = locate(&Address::from(Path::new(address)), &[], false).unwrap_err();
            assert!(
                error.to_string().contains("no data plane over TCP"),
                "{error}"
            );
        }
        for unix in ["unix:///x/s", "unix:/x/s", "/x/s"] {
            assert_eq!(
                locate(&Address::from(Path::new(unix)), &[], false).unwrap(),
                "/x/s"
            );
        }
        let long = format!("/{}", "x".repeat(107));
        let error = locate(&Address::from(Path::new(&long)), &[], false).unwrap_err();
        assert!(error.to_string().contains("has 108 bytes"), "{error}");
        let bad = Address {
            instance: Some("../x".to_owned()),
            ..Address::default()
        };
        assert!(matches!(
            locate(&bad, &[], true),
            Err(LocateError::Instance { .. })
        ));
    }
}
