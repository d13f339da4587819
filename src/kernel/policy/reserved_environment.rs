//! Environment variables that no policy may set, whatever its stack entry permits: those that load code into a process
//! or change where code is found, that name the GPUs which a process sees, or that say who it is.
//!
//! A policy is less trusted than the pods: one that may set any variable would otherwise run its code in every
//! container that gets a GPU. The names are from the documentation of each program; the words (`WORDS`) are for those
//! to come.

/// Reserved names by kind: exact, or prefixes ending in `*`.
const NAMES: [(&str, &str); 12] = [
    // ld.so(8), the list of variables that glibc ignores in privileged programs; tools that run beside a program.
    (
        "the dynamic linker or the C library",
        "LD_* GLIBC_* GCONV_PATH GETCONF_DIR LOCPATH NLSPATH MALLOC_TRACE HOSTALIASES LOCALDOMAIN \
         NIS_PATH RESOLV_HOST_CONF RES_OPTIONS LIBPATH SHLIB_PATH VALGRIND_* ASAN_* LSAN_* MSAN_* \
         TSAN_* UBSAN_*",
    ),
    // The shells' manuals, and the variables that name a program or an option of one.
    (
        "a shell or the program that runs next",
        "PATH HOME XDG_* ENV BASH* IFS SHELL* CDPATH GLOBIGNORE PS4 PROMPT_COMMAND FPATH ZDOTDIR ZSH* \
         KSH* EDITOR VISUAL PAGER MANPAGER BROWSER LESSOPEN LESSCLOSE LESSKEY* TAR_OPTIONS RSYNC_RSH \
         SUDO_* SSH_* VIMINIT EXINIT VIMRUNTIME EMACSLOADPATH S6_*",
    ),
    (
        "Python",
        "PYTHON* PYTEST_* PIP_* UV_* PEX_* CONDA_* MAMBA_* VIRTUAL_ENV IPYTHON* JUPYTER_* MPLBACKEND \
         MPLCONFIGDIR NUMBA_* PYSPARK_* PYTORCH_KERNEL_CACHE_PATH TORCH_EXTENSIONS_DIR \
         TORCH_DEVICE_BACKEND_AUTOLOAD TORCH_HOME TORCHINDUCTOR_* TRITON_* PJRT_* XLA_FLAGS CUPY_*",
    ),
    (
        "Java, .NET or JavaScript",
        "JAVA_* _JAVA_* JDK_* JRE_* JVM_* CLASSPATH MAVEN_* GRADLE_* SBT_* ANT_* CATALINA_* HADOOP_* \
         SPARK_* KOTLIN_* SCALA_* CLOJURE_* DOTNET_* CORECLR_* COR_* COMPLUS_* NUGET_* MONO_* NODE_* \
         NPM_* YARN_* PNPM_* TS_NODE_* DENO_* BUN_* ELECTRON_*",
    ),
    (
        "another language's runtime",
        "PERL* RUBY* GEM_* BUNDLE_* PHP* LUA* R_* JULIA_* ERL_* ELIXIR_* MIX_* OCAML* CAML* GHC* TCL* \
         TK_LIBRARY GUILE_* OCTAVE_* MATLAB* GODEBUG GOENV GOFLAGS GOPATH GOROOT GOTOOLCHAIN RUSTC* \
         RUSTUP_* RUSTFLAGS CARGO_*",
    ),
    // Compilers run in containers, too: PyTorch, Triton and CuPy compile kernels at run time.
    (
        "a compiler or a build",
        "CC CXX CPP CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH \
         OBJC_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_* CCACHE_* CMAKE_* MAKE* GNUMAKEFLAGS \
         MFLAGS PKG_CONFIG* NVCC_* CUDAHOSTCXX SCCACHE_* DISTCC_*",
    ),
    // The CUDA driver, its profilers' injection, the toolkit's folders, the cache of compiled kernels.
    (
        "CUDA or a library on it",
        "CUDA_INJECTION* NVTX_INJECTION* CUDA_HOME CUDA_PATH* CUDA_ROOT CUDA_TOOLKIT_* \
         CUDA_CACHE_PATH CUDA_BIN_PATH CUDA_LIB_PATH CUPTI_* NVBLAS_* CUDNN_HOME CUDNN_PATH OPTIX_* \
         NSYS_* NCU_* CUFILE_ENV_PATH_JSON NVSHMEM_BOOTSTRAP* NVSHMEM_REMOTE_TRANSPORT NCCL_CONF_FILE \
         NCCL_NET NCCL_HOME VLLM_NCCL_SO_PATH",
    ),
    (
        "a loader of graphics or compute drivers",
        "VK_* OCL_* OPENCL_* POCL_* __EGL_* __GLX_* EGL_* LIBGL_* GBM_* MESA_* LIBVA_* VDPAU_* XR_* \
         HSA_* ZE_* SYCL_* GST_* FREI0R_PATH LADSPA_PATH LV2_PATH GIO_* GTK_* GDK_* QT_* OPENCV_*",
    ),
    (
        "MPI, OpenMP or a network library",
        "OMPI_* OPAL_* PMIX_* PRTE_* I_MPI_* MPICH_* UCX_MODULE* UCX_CONFIG* UCC_CONFIG* \
         UCC_COMPONENT* FI_PROVIDER* IBV_* RDMAV_* OMP_TOOL* ACC_PROFLIB KOKKOS_*",
    ),
    // OpenSSL's configuration loads modules; the others say which certificates a process trusts, or name plugins.
    (
        "TLS or a library with plugins",
        "OPENSSL_* SSL_* SSLKEYLOGFILE GNUTLS_* CURL_* REQUESTS_CA_BUNDLE AWS_CA_BUNDLE WGETRC NETRC \
         KRB5* GSS_* SASL_* ODBC* PKCS11_* P11_* HDF5_* GDAL_* MAGICK_* DBUS_* GIT_* KUBECONFIG \
         AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE GOOGLE_APPLICATION_CREDENTIALS GOOGLE_EXTERNAL_* \
         CLOUDSDK_* DOCKER_*",
    ),
    ("the GPUs that a process sees", "NVIDIA_* CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"),
    ("who the process is", "BERTH_* KUBERNETES_*"),
];

/// Parts of a name, between underscores, that name code to load.
const WORDS: &str = "PLUGIN PLUGINS PRELOAD INJECTION INJECTION32 INJECTION64 LIB LIBS LIBRARY LIBRARIES \
    MODULES LAYERS CLASSPATH";

/// What a reserved variable affects, for messages; `None` if policies may set it.
#[must_use]
pub fn reserved_for(key: &str) -> Option<&'static str> {
    let matches = |pattern: &str| match pattern.strip_suffix('*') {
        Some(prefix) => key.starts_with(prefix),
        None => pattern == key,
    };
    let named = NAMES.iter().find(|(_, patterns)| patterns.split(' ').any(matches));
    let loads_code =
        || key.split('_').any(|part| !part.is_empty() && WORDS.split(' ').any(|word| word == part));
    named.map(|(kind, _)| *kind).or_else(|| loads_code().then_some("the code that a process loads"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_loads_code_or_changes_where_it_is_found_is_reserved() {
        let reserved = "LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT GLIBC_TUNABLES GCONV_PATH IFS PATH BASH_ENV BASHOPTS \
            SHELLOPTS ENV HOME XDG_DATA_DIRS PYTHONPATH PYTHONSTARTUP NODE_OPTIONS NODE_PATH \
            JAVA_TOOL_OPTIONS _JAVA_OPTIONS JDK_JAVA_OPTIONS CLASSPATH PERL5OPT PERL5LIB PERLLIB \
            RUBYOPT RUBYLIB PHPRC LUA_PATH LUA_CPATH_5_4 R_PROFILE JULIA_LOAD_PATH \
            DOTNET_STARTUP_HOOKS CORECLR_PROFILER_PATH ERL_FLAGS GOFLAGS RUSTC_WRAPPER OCAMLRUNPARAM \
            CUDA_INJECTION64_PATH CUDA_INJECTION32_PATH NVTX_INJECTION64_PATH CUDA_HOME \
            CUDA_CACHE_PATH NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_CONF_FILE \
            NVSHMEM_BOOTSTRAP_PLUGIN NVBLAS_CONFIG_FILE OCL_ICD_FILENAMES OCL_ICD_VENDORS \
            VK_ICD_FILENAMES VK_LAYER_PATH VK_INSTANCE_LAYERS __EGL_VENDOR_LIBRARY_FILENAMES \
            __GLX_VENDOR_LIBRARY_NAME LIBGL_DRIVERS_PATH GST_PLUGIN_PATH OPAL_PREFIX \
            I_MPI_PMI_LIBRARY UCX_MODULE_DIR FI_PROVIDER_PATH OMP_TOOL_LIBRARIES ACC_PROFLIB \
            KOKKOS_TOOLS_LIBS OPENSSL_CONF OPENSSL_MODULES SSL_CERT_FILE GIT_SSH_COMMAND \
            GIT_CONFIG_GLOBAL SSH_ASKPASS KUBECONFIG TRITON_PTXAS_PATH XLA_FLAGS \
            TORCH_EXTENSIONS_DIR PJRT_NAMES_AND_LIBRARY_PATHS VLLM_PLUGINS VLLM_NCCL_SO_PATH \
            TF_PLUGGABLE_DEVICE_LIBRARY_PATH GTK_MODULES QT_PLUGIN_PATH TAR_OPTIONS LESSOPEN PAGER \
            NVIDIA_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER BERTH_ALLOCATION \
            KUBERNETES_SERVICE_HOST SOME_NEW_PLUGIN MY_PRELOAD";
        let settable: Vec<_> = reserved.split(' ').filter(|key| reserved_for(key).is_none()).collect();
        assert_eq!(settable, [""; 0]);
    }

    #[test]
    fn what_only_tunes_a_program_is_not_reserved() {
        let settable = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_MPS_ACTIVE_THREAD_PERCENTAGE \
            CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING CUDA_LAUNCH_BLOCKING \
            CUBLAS_WORKSPACE_CONFIG NCCL_IB_HCA NCCL_DEBUG NCCL_SOCKET_IFNAME UCX_TLS \
            UCX_NET_DEVICES OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF TF_FORCE_GPU_ALLOW_GROWTH \
            XLA_PYTHON_CLIENT_MEM_FRACTION HF_HOME TEAM MY_KEY TMPDIR HTTPS_PROXY \
            GOOGLE_CLOUD_PROJECT ENVIRONMENT PATHS R CCX";
        let reserved: Vec<_> =
            settable.split(' ').filter_map(|key| Some((key, reserved_for(key)?))).collect();
        assert_eq!(reserved, []);
    }

    #[test]
    fn no_pattern_is_there_twice() {
        let mut all: Vec<_> = NAMES.iter().flat_map(|(_, patterns)| patterns.split(' ')).collect();
        all.sort_unstable();
        let prefixes: Vec<_> = all.iter().filter_map(|pattern| pattern.strip_suffix('*')).collect();
        let covered = |pattern: &&str| {
            prefixes.iter().any(|prefix| pattern.starts_with(prefix) && pattern.len() > prefix.len() + 1)
        };
        assert_eq!(all.iter().copied().filter(covered).collect::<Vec<_>>(), [""; 0]);
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
