from drm_triton.cli import main

if __name__ == "__main__":
    main()
