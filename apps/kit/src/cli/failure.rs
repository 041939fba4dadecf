use std::fmt;
use std::process::ExitCode;

use wirepath_packet::registered::RegisterError;
use wirepath_pipeline::RuntimeError;
use wirepath_pmd::port::PortError;
use wirepath_settings::ConfigError;

use super::log;

/// Failure of a program: determines the exit code and the error message.
#[derive(Debug)]
pub enum Failure {
    /// Invalid usage or configuration; nothing was started: exit code 2.
    Usage(String),
    /// A failure at run time: exit code 1.
    Failed(String),
    /// A negative result that was already printed: exit code 1.
    Silent,
    /// A program that the user asked to run could not be run. The exit code is that of a shell.
    NotRun {
        /// 126: the program cannot be executed. 127: the program was not found.
        code: u8,
        /// The error message.
        message: String,
    },
    /// A program that the user asked to run ended with this exit code and has printed its own error.
    Ended(u8),
}

impl Failure {
    /// Creates a failure because of invalid usage or configuration.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// Creates a failure at run time.
    pub fn failed(message: impl fmt::Display) -> Self {
        Self::Failed(message.to_string())
    }

    /// Joins failures that were found at once. The exit code is that of the first one.
    pub fn all(failures: &[Self]) -> Self {
        let message = failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nerror: ");
        match failures.first() {
            Some(Self::Usage(_)) => Self::Usage(message),
            _ => Self::Failed(message),
        }
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Silent => 1,
            Self::NotRun { code, .. } | Self::Ended(code) => *code,
        }
    }

    pub(super) fn report(&self) {
        if let Self::Usage(message) | Self::Failed(message) | Self::NotRun { message, .. } = self {
            // A program that reads the log reads this message too.
            if log::format() != log::Format::Text {
                log::write(tracing::Level::ERROR, module_path!(), message.clone());
                return;
            }
            // An error is ignored: if standard error is closed, the message cannot be delivered.
            super::live::end();
            let text = format!("error: {}\n", super::output::sanitized(message));
            let _ = super::outbox::STDERR.deliver(text.into_bytes());
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) | Self::NotRun { message, .. } => f.write_str(message),
            Self::Silent => f.write_str("failed"),
            Self::Ended(code) => write!(f, "ended with exit code {code}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        let (errors, omitted) = error.split();
        let mut message = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nerror: ");
        if omitted > 0 {
            message += &format!("\nerror: and {omitted} more");
        }
        Self::Usage(message)
    }
}

impl From<PortError> for Failure {
    fn from(error: PortError) -> Self {
        Self::failed(error)
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        if error.is_configuration() { Self::usage(error) } else { Self::failed(error) }
    }
}

impl From<wirepath_packet::PoolError> for Failure {
    fn from(error: wirepath_packet::PoolError) -> Self {
        Self::failed(error)
    }
}

impl From<RegisterError> for Failure {
    fn from(error: RegisterError) -> Self {
        Self::failed(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_errors_are_usage_and_the_rest_is_not() {
        let error = wirepath_settings::Source::new("c.toml", "a = = 1").parse().unwrap_err();
        assert_eq!(Failure::from(error).code(), 2);
        assert_eq!(Failure::from(PortError::QueuesMissing { port: "p".into() }).code(), 1);
        assert_eq!(Failure::from(std::io::Error::other("x")).code(), 1);
        let error = wirepath_packet::drops::DropReason::register("No", "text").unwrap_err();
        assert!(matches!(Failure::from(error), Failure::Failed(message) if message.contains("\"No\"")));
        assert_eq!(Failure::from(RuntimeError::NoCore { core: 99, allowed: vec![0], position: None }).code(), 2);
        assert_eq!(Failure::Silent.code(), 1);
    }
}
