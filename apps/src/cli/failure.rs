use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use wirepath_pmd::port::PortError;
use wirepath_pmd::settings::ConfigError;

/// Why a program ends without success: which exit code, and one message that says what to do.
#[derive(Debug)]
pub enum Failure {
    /// Bad usage or configuration, nothing was started: exit code 2.
    Usage(String),
    /// It did not work: exit code 1.
    Failed(String),
    /// The answer is "no", and was printed already: exit code 1.
    Silent,
    /// A program that was run for the user ended with this exit code, and has said why.
    Ended(u8),
}

impl Failure {
    /// Bad usage or configuration.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// A failure at work.
    pub fn failed(message: impl fmt::Display) -> Self {
        Self::Failed(message.to_string())
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Silent => 1,
            Self::Ended(code) => *code,
        }
    }

    pub(super) fn report(&self) {
        if let Self::Usage(message) | Self::Failed(message) = self {
            // Nobody is left to hear that standard error is closed.
            let _ = writeln!(std::io::stderr(), "error: {message}");
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) => f.write_str(message),
            Self::Silent => f.write_str("failed"),
            Self::Ended(code) => write!(f, "ended with exit code {code}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<PortError> for Failure {
    fn from(error: PortError) -> Self {
        Self::failed(error)
    }
}

impl From<wirepath_pmd::packet::PoolError> for Failure {
    fn from(error: wirepath_pmd::packet::PoolError) -> Self {
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
        let error = wirepath_pmd::settings::Source::new("c.toml", "a = = 1").parse().unwrap_err();
        assert_eq!(Failure::from(error).code(), 2);
        assert_eq!(Failure::from(PortError::QueuesMissing { port: "p".into() }).code(), 1);
        assert_eq!(Failure::from(std::io::Error::other("x")).code(), 1);
        assert_eq!(Failure::Silent.code(), 1);
    }
}
